"""What of a call travels, as bytes: functions, arguments, the options of integrations. What cannot is named."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future as StdFuture
from typing import Any

import cloudpickle

from ..calls.compute import ComputeFunction
from ..engine.functions import FunctionTable
from ..engine.tasks import WireFunction
from ..errors import ArgumentNotPicklable, NotRun, UsageError
from ..values.launch import ProcessLaunch
from ..wire.blobs import BlobStore
from ..wire.frames import INLINE_LIMIT
from ..wire.payloads import Encoded, encode
from ..wire.seen import SeenArrays

__all__ = ["Packer", "packed_initializer", "packed_launch"]


class Packer:
    """Packs for one pool, and remembers what it packed. Thread-safe."""

    def __init__(self) -> None:
        self._store = BlobStore()
        self._functions = FunctionTable(self._store.put)
        self.put = self._store.put

    def close(self) -> None:
        self._store.clear()

    def function(self, function: Callable[..., Any], name: str) -> WireFunction:
        """Raises ArgumentNotPicklable."""
        try:
            return self._functions.get(function)
        except NotRun as error:
            raise ArgumentNotPicklable(f"the function {name!r} cannot be sent: {error}", argument=name) from error
        except Exception as error:
            raise ArgumentNotPicklable(
                f"the function {name!r} cannot be sent: {type(error).__name__}: {error}; "
                "something it uses from outside (a global, a closure) cannot be pickled: make it inside the function",
                argument=name,
            ) from error

    def payload(self, value: Any) -> Encoded:
        """Raises whatever its pickling raises."""
        return encode(value, self.put)

    def arguments(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        seen: SeenArrays | None = None,
        *,
        may_stay: Callable[[], bool] | None = None,
    ) -> Encoded:
        """Raises ArgumentNotPicklable, naming the argument."""
        put = self.put
        try:
            if seen is None:
                return encode((args, kwargs), put, may_stay=may_stay)
            return encode((args, kwargs), lambda data: seen.put(data, put), may_stay=may_stay, reduce=seen.reduce)
        except Exception as error:
            which, value = self._unpicklable(args, kwargs)
            reason = f"{type(error).__name__}: {error}; {_advice(value)}"
            if isinstance(error, NotRun):
                reason = str(error)
            raise ArgumentNotPicklable(f"{name}(): {which} cannot be sent: {reason}", argument=which) from error

    def _unpicklable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, object]:
        named = [(f"argument {i + 1}", v) for i, v in enumerate(args)]
        named += [(f"argument {k!r}", v) for k, v in kwargs.items()]
        for which, value in named:
            try:
                encode(value, self.put)
            except Exception:  # it has the culprit; why is the error that the caller has
                return f"{which} (a {type(value).__qualname__})", value
        return "an argument", None


def _advice(value: object) -> str:
    """What to send instead of an argument that cannot be sent."""
    if isinstance(value, StdFuture):
        return "send its value: .result()"
    if isinstance(value, Iterator):
        return "annotate the parameter Iterator[...] and its items are streamed, or send a list of them"
    return "send plain data, arrays or paths, and open files, locks and connections inside the function"


def packed_launch(launch: ProcessLaunch) -> bytes:
    """Raises ArgumentNotPicklable."""
    try:
        return pickle.dumps(launch)
    except Exception as error:
        names = ", ".join(i.name for i in launch.integrations)
        raise ArgumentNotPicklable(
            f"the options of the integration ({names}) cannot be sent: {type(error).__name__}: {error}"
        ) from error


def packed_initializer(initializer: tuple[Callable[..., object], tuple[Any, ...]] | None) -> bytes | None:
    """Of a pool: (function, its arguments). Raises ArgumentNotPicklable, UsageError."""
    if initializer is None:
        return None
    function, args = initializer
    if isinstance(function, ComputeFunction):
        function = function.fn
    try:
        data: bytes = cloudpickle.dumps((function, args))
    except Exception as error:
        raise ArgumentNotPicklable(
            f"initializer: it or its initargs cannot be sent: {type(error).__name__}: {error}", argument="initializer"
        ) from error
    if len(data) > INLINE_LIMIT:
        raise UsageError(
            f"initializer: it and its initargs are {len(data)} bytes; the limit is {INLINE_LIMIT}. "
            "Load large things inside it, or with sky.once in the calls"
        )
    return data
