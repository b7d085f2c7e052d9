"""Jobs: their life and attempts, the machines that they run on, and who is told about them."""
