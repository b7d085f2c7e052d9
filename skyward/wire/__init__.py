"""Frames, payloads and blobs, and the channels that they travel on."""
