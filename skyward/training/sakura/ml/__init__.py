"""Sakura's name of the package with `async_trainer`."""
