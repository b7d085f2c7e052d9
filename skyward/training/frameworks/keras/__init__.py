"""Adapters for Keras 3's `fit` on any backend: our callbacks, and asynchronous evaluation."""
