"""What a pool shows of itself: panel, lines, log files, and the queue in front of each sink."""
