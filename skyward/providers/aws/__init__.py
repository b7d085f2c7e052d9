"""Amazon EC2. `provider` is what users hold; the other modules are the API behind it, one concern each."""

from .provider import AWS

__all__ = ["AWS"]
