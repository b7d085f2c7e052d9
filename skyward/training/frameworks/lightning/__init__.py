"""Adapters for Lightning's `Trainer`: our callbacks, asynchronous validation, and our checkpoint format."""
