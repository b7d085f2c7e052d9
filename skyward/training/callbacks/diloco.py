"""Re-export of the callback of loosely joined training, which lives in its own package."""

from ..diloco.callback import DiLoCoCallback

__all__ = ["DiLoCoCallback"]
