"""What runs on a node: the agent, and the processes of slots and ranks below it."""
