"""Amazon EC2. `provider` holds the public class; the other modules cover one part of the API each."""

from .provider import AWS

__all__ = ["AWS"]
