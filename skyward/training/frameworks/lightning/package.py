"""Lightning by either of its names: `pytorch_lightning` is the old one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ..foreign import load_framework

__all__ = ["lightning", "lightning_package"]


def lightning_package() -> str:
    """Return the name of the package that is installed."""
    is_old = find_spec("lightning") is None and find_spec("pytorch_lightning") is not None
    return "pytorch_lightning" if is_old else "lightning.pytorch"


def lightning(module: str = "") -> Any:
    """Import Lightning, or a module below it. Raises: MissingDependency."""
    return load_framework(f"{lightning_package()}.{module}".rstrip("."), extra="lightning")
