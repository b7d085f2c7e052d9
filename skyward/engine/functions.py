"""Functions ready to travel: pickled once while nothing they refer to has changed.

A function of an importable module is two names. One of `__main__` (a script, a notebook) travels by value, with the
globals it uses; it is pickled again whenever one of those is another object, or is of a kind that can change without
becoming another object.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ..calls.compute import ComputeFunction, is_importable
from ..wire.blobs import content_digest
from ..wire.payloads import PutBlob, encode
from .tasks import WireFunction

__all__ = ["FunctionTable"]

_UNCHANGING = (int, float, complex, bool, str, bytes, type(None), types.ModuleType)
_CACHED = type(functools.lru_cache(abs))

_KNOWN = 256
"""Functions whose pickle is remembered: the last that were new."""


class FunctionTable:
    """Remembers the last pickle of each function. Thread-safe."""

    def __init__(self, put: PutBlob) -> None:
        self._put = put
        # Not by weak references: a fingerprint refers to its function, which would live on all the same.
        self._known: OrderedDict[Any, tuple[Fingerprint, WireFunction]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, function: Callable[..., Any]) -> WireFunction:
        """Raises whatever its pickling raises."""
        try:
            known = self._known.get(function)
        except TypeError:  # it cannot be hashed: pickled each time
            known = None
        if known is not None and known[0].holds():
            return known[1]
        print_ = fingerprint(function)
        payload = encode(function, self._put)
        made = WireFunction(content_digest(payload.body), payload)
        if print_ is not None:
            with self._lock:
                self._known[function] = (print_, made)
                self._known.move_to_end(function)
                if len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
        return made


_MISSING = object()


class Fingerprint:
    """What a function's pickle was made of. `holds` as long as another pickle would be the same."""

    def __init__(self) -> None:
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        """(namespace, name, what stood there)"""
        self.functions: list[tuple[types.FunctionType, Any, Any, Any]] = []
        """(function, its code, defaults, keyword defaults)"""
        self.cells: list[tuple[types.CellType, Any]] = []

    def holds(self) -> bool:
        for namespace, name, value in self.names:
            if namespace.get(name, _MISSING) is not value:
                return False
        for function, code, defaults, kwdefaults in self.functions:
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ != kwdefaults
                or function.__dict__
            ):
                return False
        if not self.cells:
            return True
        try:
            return all(cell.cell_contents is value for cell, value in self.cells)
        except ValueError:  # a cell was emptied
            return False


def fingerprint(function: Any) -> Fingerprint | None:
    """None if the function refers to something that can change without becoming another object."""
    made = Fingerprint()
    return made if _add(function, made, set()) else None


def _add(obj: Any, made: Fingerprint, seen: set[int]) -> bool:
    if isinstance(obj, _UNCHANGING) or id(obj) in seen:
        return True
    seen.add(id(obj))
    if isinstance(obj, ComputeFunction):
        return is_importable(obj, obj) or _add(obj.fn, made, seen)
    if isinstance(obj, types.BuiltinFunctionType):  # a function of a module, or a method: [].append
        return _add(obj.__self__, made, seen)
    if isinstance(obj, types.FunctionType):
        return is_importable(obj, obj) or _add_parts(obj, made, seen)
    if isinstance(obj, _CACHED):
        return is_importable(obj, obj) or _add(obj.__wrapped__, made, seen)
    if isinstance(obj, types.MethodDescriptorType):  # str.upper
        return _add(obj.__objclass__, made, seen)
    if isinstance(obj, type):
        return is_importable(obj, obj)
    return type(obj) is tuple and all(_add(item, made, seen) for item in obj)


def _add_parts(function: types.FunctionType, made: Fingerprint, seen: set[int]) -> bool:
    defaults, kwdefaults = function.__defaults__, function.__kwdefaults__
    # A copy: the dictionary may be written to in place.
    made.functions.append((function, function.__code__, defaults, kwdefaults and dict(kwdefaults)))
    parts: list[Any] = [*(defaults or ()), *(kwdefaults or {}).values()]
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name, _MISSING)
        made.names.append((function.__globals__, name, value))
        if value is not _MISSING:
            parts.append(value)
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # an empty cell
            return False
        made.cells.append((cell, cell.cell_contents))
    return not function.__dict__ and all(_add(part, made, seen) for part in parts)


def _global_names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return names
