"""Names of classes, for processes that do not have them."""

from __future__ import annotations


def class_path(cls: type) -> str:
    """Return the full name of a class, by which another process can compare it."""
    return f"{cls.__module__}.{cls.__qualname__}"
