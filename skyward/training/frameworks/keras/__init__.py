"""Keras 3's `fit`: our callbacks in it, and evaluations beside it, on any of its backends."""
