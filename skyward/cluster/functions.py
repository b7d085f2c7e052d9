"""Functions ready to travel: pickled once while nothing they refer to has changed.

A function of an importable module is two names. One of `__main__` (a script, a notebook) travels by value, with the
globals it uses; it is pickled again whenever one of those is another object, or is of a kind that can change without
becoming another object.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from ..calls import ComputeFunction, find_by_name
from ..wire.blobs import content_digest
from ..wire.payloads import PutBlob, encode
from .tasks import WireFunction

__all__ = ["FunctionTable"]

_UNCHANGING = (int, float, complex, bool, str, bytes, type(None), types.ModuleType, types.BuiltinFunctionType)


class FunctionTable:
    """Remembers the last pickle of each function. Thread-safe."""

    def __init__(self, put: PutBlob) -> None:
        self._put = put
        self._known: weakref.WeakKeyDictionary[Any, tuple[Any, WireFunction]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, function: Callable[..., Any]) -> WireFunction:
        """Raises whatever its pickling raises."""
        prints = fingerprint(function)
        if prints is not None:
            with self._lock:
                known = self._known.get(function)
            if known is not None and known[0] == prints:
                return known[1]
        payload = encode(function, self._put)
        made = WireFunction(content_digest(payload.body), payload)
        if prints is not None:
            with self._lock:
                self._known[function] = (prints, made)
        return made


class _Same:
    """Equal to another one of the same object; keeps the object, so that its id stays its own."""

    __slots__ = ("_object",)

    def __init__(self, obj: Any) -> None:
        self._object = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._object is self._object

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


def fingerprint(function: Any) -> Any:
    """Compares equal as long as the function's pickle would be the same; None if nobody can tell."""
    prints: list[Any] = []
    return prints if _add(function, prints, set()) else None


def _add(obj: Any, prints: list[Any], seen: set[int]) -> bool:
    if isinstance(obj, _UNCHANGING):
        # With the type: 1 == True == 1.0.
        prints.append((type(obj), obj) if isinstance(obj, int | float | str | bytes) else _Same(obj))
        return True
    if id(obj) in seen:
        return True
    seen.add(id(obj))
    if isinstance(obj, ComputeFunction):
        prints.append(_Same(obj))
        return _is_importable(obj.fn, obj) or _add(obj.fn, prints, seen)
    if isinstance(obj, types.FunctionType):
        prints.append(_Same(obj))
        return _is_importable(obj, obj) or _add_parts(obj, prints, seen)
    if isinstance(obj, type) and obj.__module__ != "__main__" and _is_importable(obj, obj):
        prints.append(_Same(obj))
        return True
    if isinstance(obj, tuple) and type(obj) is tuple:
        return all(_add(item, prints, seen) for item in obj)
    return False


def _is_importable(named: Any, obj: Any) -> bool:
    module, name = named.__module__, named.__qualname__
    if module in ("__main__", None) or "<locals>" in name or "<lambda>" in name:
        return False
    try:
        return find_by_name(module, name) is obj
    except ImportError:
        return False


def _add_parts(function: types.FunctionType, prints: list[Any], seen: set[int]) -> bool:
    code = function.__code__
    prints.append(_Same(code))
    namespace = function.__globals__
    parts: list[Any] = [namespace[name] for name in _global_names(code) if name in namespace]
    parts.append(tuple(_global_names(code)))
    parts.append(function.__defaults__ or ())
    parts.extend((function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # an empty cell
            return False
    return not function.__dict__ and all(_add(part, prints, seen) for part in parts)


def _global_names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return names
