"""The version, and the only place that holds it (the build reads this file without importing skyward)."""

__version__ = "0.1.0.dev0"
