"""Adapters for Hugging Face's `Trainer`: our callbacks, and asynchronous evaluation."""
