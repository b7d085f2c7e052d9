"""What a pool shows: panel, lines, log files, and the queue in front of each sink."""
