"""Operations of shared things, and the store that they go to.

An operation is written once, as a generator that yields requests and is sent their answers. Called directly, it waits.
Its `aio` is the same for `async` code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from ....calls.active import open_pools
from ....core import interrupts
from ....core.unrun import short
from ....errors import ArgumentNotPicklable, PoolClosed, UsageError, WrongArguments
from ....shared.messages import StoreRequest
from ....wire.payloads import pickle_whole, unpickle_whole
from ..execute import explain_load_error
from ..runtime import current_call
from .connection import store_of

P = ParamSpec("P")
S = TypeVar("S", bound="SharedThing")
T = TypeVar("T")

Plan = Generator[StoreRequest, Any, T]
"""Steps of an operation whose value is a T."""

NAME_LIMIT = 200
_ATOMS = (str, bytes, int, float, bool, type(None))


class StoreLike(Protocol):
    """Way to the store of a pool, from a task or from the program."""

    def ask(self, request: StoreRequest) -> Any: ...
    async def ask_async(self, request: StoreRequest) -> Any: ...


class BoundOperation(Generic[P, T]):
    """Operation of one shared thing. Call it to wait for its value; `await operation.aio(...)` in `async` code.

    Example:
        hits = sky.counter("hits")
        hits.increment()
        await hits.increment.aio()
    """

    __slots__ = ("_plan", "_thing")

    def __init__(self, thing: SharedThing, plan: Callable[..., Plan[T]]) -> None:
        self._thing = thing
        self._plan = plan

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out the operation, and return its value."""
        return self._thing.run(self._steps(*args, **kwargs))

    def aio(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Return a coroutine that carries out the operation. A cancelled one undoes what nobody has received."""
        return self._thing.run_async(self._steps(*args, **kwargs))

    def _steps(self, *args: P.args, **kwargs: P.kwargs) -> Plan[T]:
        if "timeout" in kwargs:  # its name in the standard library's queues, barriers and events
            given = short(kwargs["timeout"])
            raise WrongArguments(f"timeout={given}: not an option here; write timeout_s={given}", field="timeout")
        return self._plan(self._thing, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self._plan.__name__} of {self._thing!r}>"


class Operation(Generic[S, P, T]):
    """Operation as an attribute of its class."""

    def __init__(self, plan: Callable[Concatenate[S, P], Plan[T]]) -> None:
        self._plan = plan
        functools.update_wrapper(self, plan)  # type: ignore[arg-type]  # only for the docstring and signature

    @overload
    def __get__(self, thing: None, owner: type[S]) -> Self: ...
    @overload
    def __get__(self, thing: S, owner: type[S]) -> BoundOperation[P, T]: ...
    def __get__(self, thing: S | None, owner: type[S]) -> Self | BoundOperation[P, T]:
        return self if thing is None else BoundOperation(thing, self._plan)


def operation(plan: Callable[Concatenate[S, P], Plan[T]]) -> Operation[S, P, T]:
    """Make an operation of a method that yields requests."""
    return Operation(plan)


class SharedThing:
    """Base of all shared things: a kind, a name, and the pool that holds it.

    It pickles by its name, so it may be an argument of a call, or in a closure. In the process that opened the pool it
    works while the pool is open, and in the pool's tasks.
    """

    kind = ""

    def __init__(self, name: str) -> None:
        call = current_call()
        if call is None:
            raise UsageError(
                f"name={short(name)}: sky.{self.kind}(name) is for tasks, and this code runs in none; "
                f"in the program use pool.{self.kind}(name)"
            )
        self._place(name, call.info.job_id)

    def _place(self, name: str, pool: str) -> None:
        if not isinstance(name, str) or not 1 <= len(name) <= NAME_LIMIT:
            raise UsageError(
                f"name={short(name)}: is not the name of a {self.kind}; pass 1 to {NAME_LIMIT} characters",
                field="name",
                value=name,
            )
        self._name = name
        self._pool = pool

    @property
    def name(self) -> str:
        """Name of the thing in its pool. Each kind has names of its own."""
        return self._name

    def __repr__(self) -> str:
        return f"<{self.kind} {self._name!r} of pool {self._pool}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and (other._name, other._pool) == (self._name, self._pool)

    def __hash__(self) -> int:
        return hash((self.kind, self._name, self._pool))

    def __reduce__(self) -> tuple[Any, ...]:
        return thing_of, (type(self), self._pool, self._name, *self._options())

    def _options(self) -> tuple[Any, ...]:
        """Return the fixed properties of the thing, on which all who use it must agree."""
        return ()

    def _set_options(self, *options: Any) -> None:
        """Take what `_options` returned."""

    # Requests ---------------------------------------------------------------------------------------------------------

    def run(self, plan: Plan[T]) -> T:
        """Carry out the steps of an operation in this thread."""
        ask = self._store().ask
        try:
            request = next(plan)
            while True:
                request = plan.send(ask(request))
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def run_async(self, plan: Plan[T]) -> T:
        """Carry out the steps of an operation in an event loop."""
        ask = self._store().ask_async
        request = next(plan)
        while True:
            answer = await ask(request)
            try:
                request = plan.send(answer)
            except StopIteration as stop:
                value: T = stop.value
                return value

    def _request(self, verb: str, *arguments: Any, is_lease: bool = False) -> StoreRequest:
        return StoreRequest(self.kind, self._name, verb, arguments, self._options(), is_lease=is_lease)

    def _wait_request(
        self, verb: str, *arguments: Any, timeout_s: float | None, is_lease: bool = False
    ) -> StoreRequest:
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 <= timeout_s < math.inf):
            raise UsageError(
                f"timeout_s={short(timeout_s)}: must be a number >= 0, or None; pass None to wait without a limit",
                field="timeout_s",
                value=timeout_s,
            )
        return StoreRequest(self.kind, self._name, verb, arguments, self._options(), timeout_s, True, is_lease)

    def _store(self) -> StoreLike:
        call = current_call()
        if call is not None and call.info.job_id == self._pool:
            return store_of(call)
        for pool in open_pools():
            if getattr(pool, "job_id", None) == self._pool:
                store: StoreLike = pool.shared_store()  # type: ignore[attr-defined]
                return store
        if call is not None:
            raise UsageError(
                f"{self!r}: belongs to another pool than this task ({call.info.job_id}); use things of its own pool"
            )
        raise PoolClosed(
            f"{self!r}: its pool is not open here; use it in tasks of that pool, or in the process that opened it "
            "while it is open"
        )

    # Keys and values --------------------------------------------------------------------------------------------------

    def _dump(self, value: Any) -> bytes:
        try:
            return pickle_whole(value)
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            raise ArgumentNotPicklable(
                f"value of {self!r}: cannot be sent: {type(error).__name__}: {error}; store plain data or paths",
                argument="value",
            ) from error

    def _load(self, data: bytes) -> Any:
        try:
            return unpickle_whole(data)
        except Exception as error:
            raise explain_load_error(error, f"a value of {self!r}") from error


def thing_of(cls: type[S], pool: str, name: str, *options: Any) -> S:
    """Return the thing of that name in a pool; `options` are those of its class."""
    thing = cls.__new__(cls)
    thing._place(name, pool)
    thing._set_options(*options)
    return thing


def check_key(field: str, key: Any) -> Any:
    """Return a key of a dictionary, or a member of a set.

    Raises:
        UsageError: It is not plain data.
    """
    if type(key) in _ATOMS or (type(key) is tuple and all(check_key(field, part) is part for part in key)):
        return key
    raise UsageError(
        f"{field}={short(key)}: must be str, bytes, int, float, bool, None or a tuple of these; "
        "convert it, for example with str() or tuple()",
        field=field,
        value=key,
    )


def check_count(field: str, value: Any, least: int) -> int:
    """Return a whole number.

    Raises:
        UsageError: It is not one, or too small.
    """
    if type(value) is bool or not isinstance(value, int) or value < least:
        raise UsageError(
            f"{field}={short(value)}: must be a whole number >= {least}; pass {max(1, least)} or more",
            field=field,
            value=value,
        )
    return int(value)
