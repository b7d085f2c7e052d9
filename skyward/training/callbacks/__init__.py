"""What watches a run, and what may end it: one callback, or one family of them, a file."""
