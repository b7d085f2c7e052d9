"""Wrappers of the standard library around functions that travel by value: `lru_cache` and `singledispatch`.

Pickle knows them by name only, and the names of a script lead nowhere on a node. A wrapper is made anew there around
its function. A function that calls itself through its wrapper leads back to it while it is pickled; pickle itself sees
that what it has begun was finished on the way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType, MappingProxyType
from typing import Any

__all__ = ["reduce_wrapper"]

_CACHED = type(functools.lru_cache(abs))


def reduce_wrapper(obj: Any) -> Any:
    """How to pickle a wrapper that cannot be found by its name; None for everything else."""
    if type(obj) is _CACHED:
        return None if _is_named(obj) else (_cached, (obj.__wrapped__, obj.cache_parameters()))
    if type(obj) is FunctionType and type(obj.__dict__.get("registry")) is MappingProxyType and not _is_named(obj):
        default = getattr(obj, "__wrapped__", None)
        return None if default is None else (_dispatched, (default, dict(obj.__dict__["registry"])))
    return None


def _is_named(obj: Any) -> bool:
    if obj.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(obj.__module__)
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _dispatched(default: Callable[..., Any], registry: dict[type, Callable[..., Any]]) -> Any:
    made = functools.singledispatch(default)
    for kind, function in registry.items():
        made.register(kind, function)
    return made
