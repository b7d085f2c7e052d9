"""The daemon of a node: hosts slots and ranks, holds blobs and output, and its watchdog."""
