"""What a pool shows of itself: a live view on a terminal, plain lines elsewhere, a single line in notebooks."""
