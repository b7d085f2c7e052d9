"""Conversion of callbacks' states to JSON and back, for frameworks whose checkpoints are JSON.

JSON types stay readable. Tensors and arrays become bytes with type and shape. Tuples, sets, bytes and dicts with other
keys than strings are marked. NaN and infinities are written as Python's json module writes them.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from typing import Any

from ...errors import UsageError

_MARK = "__skyward__"
_COLLECTIONS: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def to_json(value: Any, *, where: str = "state") -> Any:
    """Convert a state to JSON types. Tensors are copied to the CPU.

    Args:
        value: the state.
        where: name of the state in errors.

    Raises:
        UsageError: a part cannot be converted; the message names its place.
    """
    if value is None or isinstance(value, bool | int | float | str):
        # Subclasses such as IntEnum or numpy's float64 come back as the plain type.
        return value if type(value) in (type(None), bool, int, float, str) else _plain(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list):
        return [to_json(item, where=f"{where}[{at}]") for at, item in enumerate(value)]
    if isinstance(value, tuple | set | frozenset | bytes):
        return _marked(value, where)
    if isinstance(value, Mapping):
        return _mapping(value, where)
    if type(value).__module__ == "numpy" and not getattr(value, "shape", (0,)):
        return to_json(value.item(), where=where)
    return _array(value, where)


def from_json(value: Any) -> Any:
    """Convert the result of `to_json` back. Tensors are on the CPU; torch is imported only for them."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {name: from_json(item) for name, item in value.items()}
    held = value["value"]
    if kind == "mapping":
        return {from_json(name): from_json(item) for name, item in held}
    if kind == "bytes":
        return base64.b64decode(held)
    if kind in ("tensor", "array"):
        return _from_array(kind, base64.b64decode(held), value["dtype"], value["shape"])
    return _COLLECTIONS[kind](from_json(item) for item in held)


def _plain(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _marked(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {_MARK: "bytes", "value": base64.b64encode(value).decode()}
    kind = next(name for name, kept in _COLLECTIONS.items() if isinstance(value, kept))
    return {_MARK: kind, "value": [to_json(item, where=f"{where}[{at}]") for at, item in enumerate(value)]}


def _mapping(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    if all(isinstance(name, str) for name in value) and _MARK not in value:
        return {str(name): to_json(item, where=f"{where}[{name!r}]") for name, item in value.items()}
    pairs = [[to_json(name, where=where), to_json(item, where=f"{where}[{name!r}]")] for name, item in value.items()]
    return {_MARK: "mapping", "value": pairs}


def _array(value: Any, where: str) -> dict[str, Any]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")  # a value of theirs implies that they are loaded
    if torch is not None and isinstance(value, torch.Tensor):
        # As bytes, because numpy has no bfloat16; flat, because a scalar cannot be viewed as bytes.
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {_MARK: "tensor", "dtype": dtype, "shape": list(value.shape), "value": base64.b64encode(data).decode()}
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        data = numpy.ascontiguousarray(value).tobytes()
        kind = value.dtype.str
        return {_MARK: "array", "dtype": kind, "shape": list(value.shape), "value": base64.b64encode(data).decode()}
    raise UsageError(
        f"{where}: a JSON checkpoint cannot keep a value of type {type(value).__name__}; return numbers, strings, "
        "lists, dicts, tensors and arrays from state_dict()"
    )


def _from_array(kind: str, data: bytes, dtype: str, shape: list[int]) -> Any:
    if kind == "array":
        import numpy

        return numpy.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    import torch

    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
