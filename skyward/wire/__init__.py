"""Frames, payloads and blobs, and the channels that carry them."""
