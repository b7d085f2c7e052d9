"""Becomes the real torchmetrics, which finds fewer optional libraries: see without_companions.py."""

from without_companions import become

become(__name__)
