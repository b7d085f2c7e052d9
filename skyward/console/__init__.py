"""Output of a pool for people: the live view, plain lines, log files, notebooks, and the queue of each sink."""
