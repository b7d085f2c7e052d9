"""What other processes of this user read: the journal of what was rented, open pools, their output."""
