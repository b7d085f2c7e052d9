"""Frameworks: placeholder until the registry is written."""
