"""Nested values, such as states and batches. Dicts, lists and tuples nest; everything else is a leaf."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves_of(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every leaf, in the order of the state. Paths are like `state.0.exp_avg`."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for at, value in enumerate(state):
            yield from leaves_of(value, f"{path}.{at}" if path else str(at))
    else:
        yield path, state


def map_leaves(state: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same nesting with changed leaves. Mappings keep their class if it is in the standard library."""
    if isinstance(state, Mapping):
        changed = {key: map_leaves(value, change) for key, value in state.items()}
        return changed if type(state) is dict else _like(state, changed)
    if isinstance(state, list):
        return [map_leaves(value, change) for value in state]
    if isinstance(state, tuple):
        values = [map_leaves(value, change) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else tuple(values)
    return change(state)


def _like(state: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    if isinstance(state, defaultdict):
        return defaultdict(state.default_factory, changed)
    return next((kind(changed) for kind in (OrderedDict, Counter) if isinstance(state, kind)), changed)
