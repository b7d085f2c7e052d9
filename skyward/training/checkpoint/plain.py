"""Conversion of states to values that torch loads without running code, and back.

NumPy numbers and arrays, paths, frozensets and default dicts are written as marked dicts of plain values, and come back
as they were. Members of IntEnum and StrEnum become the number or string that they equal. Every other value is loaded
once on trial: a value that cannot be loaded is refused at the save, and not weeks later when a run resumes.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import Any, NoReturn

import torch

from ...errors import UsageError

_MARK = "__skyward_kind__"
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, torch.nn.Parameter, torch.Size}
    | {torch.dtype, torch.device}
)
_DICTS = (dict, OrderedDict, Counter)
_FACTORIES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list, dict, set)},
    "None": None,
}
_PATHS = {"Path": pathlib.Path, "PurePosixPath": pathlib.PurePosixPath, "PureWindowsPath": pathlib.PureWindowsPath}


def to_plain(state: Any, *, where: str, allow_pickle: bool = False) -> Any:
    """Return `state` itself if it is plain, otherwise a copy with the same tensors.

    Args:
        state: state dict, with any nesting.
        where: name of the state in an error.
        allow_pickle: leave other values as they are.

    Raises:
        UsageError: a value could not be loaded again; the message names its place.
    """
    return _Writer(where, allow_pickle).plain(state, "")


def from_plain(state: Any) -> Any:
    """Undo `to_plain`. Raise ValueError for an unknown mark."""
    if isinstance(state, dict):
        if _MARK in state:
            return _read(state)
        return _changed(state, {key: from_plain(value) for key, value in state.items()})
    if type(state) in (list, tuple):
        return _changed_sequence(state, [from_plain(value) for value in state])
    return state


class _Writer:
    def __init__(self, where: str, allow_pickle: bool) -> None:
        self._where, self._allow_pickle = where, allow_pickle
        self._tensor_types: set[type[Any]] = set()

    def plain(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind in _DICTS:
            return self._dict(value, path)
        if kind in (list, tuple):
            values = [self.plain(item, f"{path}.{at}") for at, item in enumerate(value)]
            return _changed_sequence(value, values)
        if kind in (set, frozenset):
            values = [self._key(item, path) for item in value]
            return _marked("frozenset", value=values) if kind is frozenset else _changed_sequence(value, values)
        if kind is defaultdict and _name_of(value.default_factory) is not None:
            return _marked("defaultdict", factory=_name_of(value.default_factory), value=self._dict(value, path))
        return self._other(value, path)

    def _other(self, value: Any, path: str) -> Any:
        if isinstance(value, Enum) and isinstance(value, int | float | str):
            return self.plain(value.value, path)
        if isinstance(value, pathlib.PurePath):
            kind = "Path" if isinstance(value, pathlib.Path) else type(value).__name__
            if kind in _PATHS:
                return _marked("path", type=kind, value=str(value))
        array = _array_of(value)
        if array is not None:
            return array
        if not self._allow_pickle:
            self._try(value, path)
        return value

    def _dict(self, value: Mapping[Any, Any], path: str) -> Any:
        keys = [self._key(key, path) for key in value]
        values = [self.plain(item, f"{path}.{key}") for key, item in zip(keys, value.values(), strict=True)]
        changed = dict(zip(keys, values, strict=True))
        if _MARK in changed:
            return _marked("dict", value=[list(pair) for pair in changed.items()])
        return _changed(value, changed)

    def _key(self, key: Any, path: str) -> Any:
        """Convert a key of a dict or a member of a set. A NumPy number is the same key as the plain one."""
        if type(key) is tuple:
            return tuple(self._key(item, path) for item in key)
        if _array_of(key) is not None:
            return key.item()
        plain = self.plain(key, path)
        if isinstance(plain, dict):
            self._refuse(key, path)
        return plain

    def _try(self, value: Any, path: str) -> None:
        """Load the value as a reader of the checkpoint would. Of each class of tensors only the first is tried."""
        if isinstance(value, torch.Tensor):
            if type(value) in self._tensor_types or callable(getattr(value, "to_local", None)):
                return
            self._tensor_types.add(type(value))
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.PickleError, TypeError, AttributeError) as error:
            self._refuse(value, path, error)

    def _refuse(self, value: Any, path: str, cause: Exception | None = None) -> NoReturn:
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        shown = f"{value!r:.60}"
        advice = "its .value" if isinstance(value, Enum) else "numbers, strings, tensors, arrays, lists and dicts"
        raise UsageError(
            f"{self._where}: {path.removeprefix('.') or 'state_dict()'}={shown}: a checkpoint with this class, {name}, "
            f"could not be loaded again, because that may run code; return {advice} from state_dict(), or save and "
            "load with allow_pickle=True"
        ) from cause


def _marked(kind: str, **fields: Any) -> dict[str, Any]:
    return {_MARK: kind, **fields}


def _changed(before: Mapping[Any, Any], after: dict[Any, Any]) -> Any:
    """Return the original mapping if nothing changed, so that objects shared within a state stay shared."""
    is_same = all(
        key is other and before[key] is value for (key, value), other in zip(after.items(), before, strict=True)
    )
    kind = type(before)
    if is_same and kind in _DICTS:
        return before
    return kind(after) if kind in (OrderedDict, Counter) else after  # type: ignore[call-arg]  # both take a dict


def _changed_sequence(before: Any, after: list[Any]) -> Any:
    is_same = all(one is other for one, other in zip(before, after, strict=True))
    return before if is_same else type(before)(after)


def _name_of(factory: Any) -> str | None:
    return next((name for name, known in _FACTORIES.items() if factory is known), None)


def _array_of(value: Any) -> dict[str, Any] | None:
    """Mark a NumPy array or number whose bytes are all of it: no objects, structures or types of other libraries."""
    numpy = sys.modules.get("numpy")  # if it was never imported, no value can be of its types
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return None
    if value.dtype.kind not in "biufcmMSU":
        return None
    flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
    kind = "numpy.ndarray" if type(value) is numpy.ndarray else "numpy.generic"
    tensor = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
    return _marked(kind, dtype=value.dtype.str, shape=list(value.shape), value=tensor)


def _read(marked: Mapping[str, Any]) -> Any:
    kind, value = marked[_MARK], marked.get("value")
    if kind == "dict":
        return {key: from_plain(item) for key, item in value or ()}
    if kind == "frozenset":
        return frozenset(from_plain(item) for item in value or ())
    if kind == "defaultdict":
        return defaultdict(_FACTORIES[marked["factory"]], from_plain(value))
    if kind == "path":
        return _PATHS[marked["type"]](value)
    if kind in ("numpy.ndarray", "numpy.generic"):
        import numpy as np

        dtype = np.dtype(str(marked["dtype"]))
        if dtype.hasobject:
            raise ValueError(f"dtype={dtype}: an array of objects is not plain; the file is damaged or foreign")
        array = np.asarray(value).view(dtype).reshape(marked["shape"])
        return array if kind == "numpy.ndarray" else array[()]
    raise ValueError(f"kind={kind!r}: this version of skyward does not know it; use a newer one")
