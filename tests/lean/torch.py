"""Becomes the real torch, with its compiler out of the way until something is compiled: see without_compiler.py."""

from without_companions import become

become(__name__)
