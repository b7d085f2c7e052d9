"""Hugging Face's `Trainer`: our callbacks in it, and evaluations beside it."""
