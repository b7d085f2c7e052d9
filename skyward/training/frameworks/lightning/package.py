"""Import of Lightning under its current name or its old one, `pytorch_lightning`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ..foreign import load_framework


def lightning_package() -> str:
    """Return the name of the installed package; the current name if both or none are installed."""
    is_old = find_spec("lightning") is None and find_spec("pytorch_lightning") is not None
    return "pytorch_lightning" if is_old else "lightning.pytorch"


def lightning(module: str = "") -> Any:
    """Import Lightning, or a module below it.

    Raises:
        MissingDependency: Lightning is not installed.
    """
    return load_framework(f"{lightning_package()}.{module}".rstrip("."), extra="lightning")
