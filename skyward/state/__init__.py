"""State on disk for other processes of this user: journals of rentals, open pools, their output."""
