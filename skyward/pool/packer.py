"""Pickling of a call's parts: functions, arguments, options of integrations. Errors name the part.

A function is pickled once while nothing it refers to has changed. A function of an importable module is sent as two
names. A function of `__main__` (a script, a notebook) is sent by value, together with the globals that it uses. It is
pickled again whenever one of those is replaced, or is of a kind that can change in place.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future as StdFuture
from typing import Any

import cloudpickle

from ..calls.graphs import has_calls
from ..calls.importable import is_importable
from ..calls.pending import ComputeFunction
from ..core import interrupts
from ..core.signatures import innermost
from ..engine.tasks import WireFunction
from ..errors import ArgumentNotPicklable, NotRun, UsageError
from ..values.launch import ProcessLaunch
from ..values.ref import splice
from ..wire.blobs import BlobStore, content_digest
from ..wire.frames import INLINE_LIMIT
from ..wire.payloads import NO_ARGUMENTS, Encoded, PutBlob, check_picklable, copy_stays, encode, send_stays
from ..wire.pull import PullRefused
from ..wire.seen import SeenArrays


class Packer:
    """Pickles parts of calls for one pool, and remembers the results. Thread-safe."""

    def __init__(self) -> None:
        self._store = BlobStore()
        self._functions = FunctionTable(self._store.put)
        self.put = self._store.put

    def close(self) -> None:
        self._store.clear()

    def hold(self, payload: Encoded) -> Encoded:
        """Copy the buffers that stay in this process's memory, for a call whose caller does not wait.

        Bytes that were sent before, or cannot be copied, become blobs: those are shared by all calls that need them.
        """
        if not any(self._store.is_repeated(view) for view in payload.stays):
            with contextlib.suppress(PullRefused, OSError):  # no memory, or a sandbox
                return copy_stays(payload)
        return send_stays(payload, self.put)

    def function(self, function: Callable[..., Any], name: str) -> WireFunction:
        """Pickle a function. Raises ArgumentNotPicklable."""
        try:
            made = self._functions.get(function)
            blobs = made.payload.blobs
            if blobs and any(blob.here() is None for blob in blobs):
                raise UsageError("ref: used without being an argument; pass it as one")
            return made
        except NotRun as error:
            why = f"the function {name!r} cannot be sent: {error}"
            raise ArgumentNotPicklable(why, argument=name) from error  # words: ok, NotRun says what to do
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            raise ArgumentNotPicklable(
                f"the function {name!r} cannot be sent: {type(error).__name__}: {error}. It uses "
                f"{_unpicklable_in(function) or 'something from outside (a global, a closure)'}, which cannot be "
                "pickled; make it inside the function",
                argument=name,
            ) from error

    def payload(self, value: Any) -> Encoded:
        """Pickle a value. Raises whatever pickling raises."""
        return encode(value, self.put)

    def arguments(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        seen: SeenArrays | None = None,
        *,
        may_stay: Callable[[int], bool] | None = None,
    ) -> Encoded:
        """Pickle the arguments of a call.

        Raises:
            ArgumentNotPicklable: An argument cannot be pickled. The error names it.
            NotRun: There are calls among the arguments, which have to run first.
        """
        if not (args or kwargs):
            return NO_ARGUMENTS
        put = self.put
        args, kwargs = splice(args, kwargs)
        try:
            if seen is None:
                return encode((args, kwargs), put, may_stay=may_stay)
            return encode((args, kwargs), lambda data: seen.put(data, put), may_stay=may_stay, reduce=seen.reduce)
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            if isinstance(error, NotRun) and has_calls((args, kwargs)):
                raise  # not a mistake, but a graph of calls
            which, value = self._unpicklable(args, kwargs)
            reason = f"{type(error).__name__}: {error}; {_advice(value)}"
            if isinstance(error, NotRun):
                reason = str(error)
            why = f"{name}(): {which} cannot be sent: {reason}"
            raise ArgumentNotPicklable(why, argument=which) from error  # words: ok, NotRun says what to do

    def _unpicklable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, object]:
        named = [(f"argument {i + 1}", v) for i, v in enumerate(args)]
        named += [(f"argument {k!r}", v) for k, v in kwargs.items()]
        for which, value in named:
            try:
                encode(value, self.put)
            except Exception as error:  # this argument is the culprit; the caller already has the error
                if interrupts.is_from_handler(error):
                    raise
                return f"{which} (a {type(value).__qualname__})", value
        return "an argument", None


def _advice(value: object) -> str:
    """Return what to send instead of an argument that cannot be pickled."""
    if isinstance(value, StdFuture):
        return "send its value: .result()"
    if isinstance(value, Iterator):
        return "annotate the parameter Iterator[...] to stream the items, or send a list of them"
    return "send plain data, arrays or paths, and create files, locks and connections inside the function"


def packed_launch(launch: ProcessLaunch) -> bytes:
    """Pickle the launch of a call's processes. Raises ArgumentNotPicklable."""
    try:
        return pickle.dumps(launch)
    except Exception as error:
        names = ", ".join(i.name for i in launch.integrations)
        raise ArgumentNotPicklable(
            f"integration {names}: its options cannot be sent: {type(error).__name__}: {error}; pass plain data"
        ) from error


def packed_initializer(initializer: tuple[Callable[..., object], tuple[Any, ...]] | None) -> bytes | None:
    """Pickle the initializer of a pool with its arguments. Raises ArgumentNotPicklable or UsageError."""
    if initializer is None:
        return None
    function, args = initializer
    if isinstance(function, ComputeFunction):
        function = function.fn
    try:
        data: bytes = cloudpickle.dumps((function, args))
    except Exception as error:
        raise ArgumentNotPicklable(
            f"initializer: it or its initargs cannot be sent: {type(error).__name__}: {error}; make such "
            "objects inside the initializer",
            argument="initializer",
        ) from error
    if len(data) > INLINE_LIMIT:
        raise UsageError(
            f"initializer: it and its initargs have {len(data)} bytes, over the limit of {INLINE_LIMIT}; load large "
            "data inside it, or with sky.once in the calls"
        )
    return data


_UNCHANGING = (int, float, complex, bool, str, bytes, type(None), types.ModuleType)
_CACHED = type(functools.lru_cache(abs))

_KNOWN = 256
"""Number of functions whose pickle is remembered, the newest ones."""


class FunctionTable:
    """Remembers the last pickle of each function. Thread-safe."""

    def __init__(self, put: PutBlob) -> None:
        self._put = put
        # Weak references would not help: a fingerprint refers to its function and would keep it alive.
        self._known: OrderedDict[Any, tuple[Fingerprint, WireFunction]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, function: Callable[..., Any]) -> WireFunction:
        """Return the pickle of a function. Raises whatever pickling raises."""
        try:
            known = self._known.get(function)
        except TypeError:  # not hashable, so it is pickled each time
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
    """State that a function's pickle depends on. `holds` while another pickle would be the same."""

    def __init__(self) -> None:
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        """(namespace, name, value)"""
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
    """Return a function's fingerprint; None if it refers to something that can change in place."""
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
    # A copy, because the dictionary can change in place.
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


def _unpicklable_in(function: Any, users: tuple[types.FunctionType, ...] = ()) -> str:
    """Name the variable from outside that cannot be pickled, for a message; "" if none is found.

    Args:
        function: A function that cannot be pickled.
        users: Functions that use it.
    """
    code = _travelling(innermost(function.fn if isinstance(function, ComputeFunction) else function))
    if code is None:
        return ""
    users = (*users, code)
    for name, value in _variables_outside(code):
        if _travelling(value) in users:  # functions that use each other: the fault is in another variable
            continue
        try:
            check_picklable(value)
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            inner = "" if _travelling(value) is None else _unpicklable_in(value, users)
            return inner or f"{name!r} from outside"
    return ""


def _travelling(value: Any) -> types.FunctionType | None:
    """Return a value if it is a Python function that is sent by value, together with the variables that it uses."""
    function = value.fn if isinstance(value, ComputeFunction) else value
    return function if isinstance(function, types.FunctionType) and not is_importable(function, function) else None


def _variables_outside(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Return the variables that a function uses and does not make itself: around it, global, or defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell: the variable has no value yet
            yield name, cell.cell_contents
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            yield parameter.name, parameter.default


def _global_names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return names
