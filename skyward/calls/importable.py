"""Functions and classes that other processes find by their names, so that they travel without their code."""

from __future__ import annotations

from typing import Any


def is_importable(named: Any, value: object) -> bool:
    """Return whether a callable's names lead to this value in every process that can import its module."""
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return False
    try:
        return find_by_name(module, name) is value
    except ImportError:  # no importable name, so it travels by value
        return False


def find_by_name(module: str, qualified_name: str) -> Any:
    """Return the object with that qualified name, importing its module if necessary; None if it does not exist."""
    import importlib
    import sys

    value = _reach(sys.modules.get(module), qualified_name)
    if value is None:  # perhaps another thread is importing the module right now: import_module waits for it
        value = _reach(importlib.import_module(module), qualified_name)
    return value


def _reach(owner: Any, qualified_name: str) -> Any:
    for part in qualified_name.split("."):
        owner = getattr(owner, part, None)
    return owner
