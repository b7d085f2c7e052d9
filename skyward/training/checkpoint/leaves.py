"""The leaves of a nested state: what is copied, compared and digested.

A state is nested dicts, lists, tuples; everything else is a leaf. Paths are written as one would write them in code
without quotes: `state.0.exp_avg`.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import xxhash

__all__ = ["digest_of", "leaves_of", "local_of", "map_leaves"]


def leaves_of(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every leaf, in the order of the state."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for at, value in enumerate(state):
            yield from leaves_of(value, f"{path}.{at}" if path else str(at))
    else:
        yield path, state


def map_leaves(state: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting with changed leaves. Mappings keep their class where it is a dict of the standard library."""
    if isinstance(state, torch.Tensor):  # most are: asked first, for a model has thousands
        return change(state)
    if isinstance(state, Mapping):
        changed = {key: map_leaves(value, change) for key, value in state.items()}
        return changed if type(state) is dict else _like(state, changed)
    if isinstance(state, list):
        return [map_leaves(value, change) for value in state]
    if isinstance(state, tuple):
        values = [map_leaves(value, change) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else tuple(values)
    return change(state)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a DTensor; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if callable(to_local) else tensor


def digest_of(value: Any) -> str:
    """xxh3 of 128 bits, as hexadecimal, of a leaf: a tensor's dtype, shape and bytes; another value's pickle."""
    found = xxhash.xxh3_128()
    if isinstance(value, torch.Tensor):
        _add_tensor(found, value)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        found.update(f"{type(value).__name__}:{value!r}".encode())
    else:
        found.update(pickle.dumps(value, protocol=4))
    return found.hexdigest()


def _add_tensor(found: Any, tensor: torch.Tensor) -> None:
    found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    plain = local_of(tensor.detach())
    if plain.layout is not torch.strided:
        plain = plain.coalesce() if plain.layout is torch.sparse_coo else plain.to_sparse_coo().coalesce()
        _add_tensor(found, plain.indices())
        plain = plain.values()
    if plain.numel():
        # As bytes: numpy has no bfloat16 and none of the 8-bit floats.
        flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        found.update(cast("Any", flat.view(torch.uint8).numpy()))


def _like(state: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    if isinstance(state, defaultdict):
        return defaultdict(state.default_factory, changed)
    return next((kind(changed) for kind in (OrderedDict, Counter) if isinstance(state, kind)), changed)
