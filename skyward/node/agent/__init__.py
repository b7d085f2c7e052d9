"""Daemon of a node: hosts slots and ranks, holds blobs and output, and has a watchdog."""
