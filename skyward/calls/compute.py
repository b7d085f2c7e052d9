"""`@compute`, `gather`, and the way from a function with its arguments to a pending call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from concurrent.futures import Future as StdFuture
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from ..accelerators import Accelerator
from ..core.signatures import innermost, name_of
from ..core.unrun import Unrun, short
from ..errors import UsageError
from ..values.launch import RankValues
from .options import CallOptions, proper_options
from .pending import ComputeFunction, PendingCompute, PendingComputeGroup

if TYPE_CHECKING:
    from .pending import GangFunction

P = ParamSpec("P")
T = TypeVar("T")


class GangDecorator(Protocol):
    """Decorator `compute(nodes=2)`: each call has a list of values, one for each node."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the first one that fits is meant
        self, fn: Callable[P, RankValues[T]], /
    ) -> ComputeFunction[P, RankValues[T]]: ...
    @overload
    def __call__(self, fn: Callable[P, T], /) -> GangFunction[P, T]: ...


@overload
def compute(fn: Callable[P, T], /) -> ComputeFunction[P, T]: ...
@overload
def compute(
    *,
    nodes: int,
    timeout_s: float | None = None,
    retries: int = 0,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    retry_delay_s: float = 0.0,
    retries_on_loss: int = 0,
    max_restarts: int = 0,
    hang_timeout_s: float | None = None,
    name: str | None = None,
    timeout: float | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
    memory_gib: float | None = None,
    accelerator: str | Accelerator | None = None,
) -> GangDecorator: ...
@overload
def compute(
    *,
    timeout_s: float | None = None,
    retries: int = 0,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    retry_delay_s: float = 0.0,
    retries_on_loss: int = 0,
    max_restarts: int = 0,
    hang_timeout_s: float | None = None,
    name: str | None = None,
    timeout: float | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
    memory_gib: float | None = None,
    accelerator: str | Accelerator | None = None,
) -> Callable[[Callable[P, T]], ComputeFunction[P, T]]: ...
def compute(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make calls of a function lazy, so that an operator can send them to a pool.

    Use it bare, or with the options of `CallOptions`. It goes above integrations and output decorators. The function
    keeps its signature and types. `.local(...)` runs the original function in place.

    Args:
        fn: The function, when the decorator is used bare.
        options: Options of the calls; see `CallOptions`.

    Returns:
        A `ComputeFunction`. Its calls are `PendingCompute` values.

    Raises:
        UsageError: An option is unknown or outside its range, or the decorated object is not a plain function.

    Example:
        >>> @compute(retries=2)
        ... def add(a: int, b: int) -> int:
        ...     return a + b
        >>> add.local(1, 2)
        3
        >>> add(1, 2)
        <add(1, 2), not run: send it with `>> pool`>
    """
    checked = CallOptions(**proper_options(options))

    def decorate(function: Callable[..., Any]) -> ComputeFunction[..., Any]:
        if isinstance(function, ComputeFunction):
            raise UsageError(f"compute(): {function!r} is decorated already; use .with_options(...) to change it")
        if isinstance(function, functools.partial) and isinstance(function.func, ComputeFunction):
            inner = function.func
            bound = functools.partial(inner.fn, *function.args, **function.keywords)
            return ComputeFunction(bound, checked if options else inner.options)
        if isinstance(function, Unrun):
            raise UsageError(f"{short(function)}: a call, not a function; pass the function itself, without arguments")
        if not callable(function):
            raise UsageError(f"compute(): {function!r} is not a function; decorate a function")
        code = innermost(function)
        if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
            raise UsageError(
                f"compute(): {name_of(function)} is an `async def`, and its coroutine cannot be sent; "
                "decorate a plain function that calls asyncio.run(...)"
            )
        return ComputeFunction(function, checked)

    return decorate if fn is None else decorate(fn)


def pending_of(
    call: PendingCompute[Any] | Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> PendingCompute[Any]:
    """Return the call that a method of a target received: a pending call, or a function with its arguments.

    Raises:
        UsageError: It is neither.
    """
    if isinstance(call, PendingCompute):
        if args or kwargs:
            raise UsageError(f"{call!r}: this call has its arguments already; pass the call alone")
        return call
    if isinstance(call, PendingComputeGroup):
        raise UsageError(f"{call!r}: this is a group; use run_group(), submit_group(), or the operators >> and >")
    if not callable(call):
        raise UsageError(f"call={short(call)}: neither a function nor a call; pass a function and its arguments")
    return as_compute(call)(*args, **(kwargs or {}))


def as_compute(function: Callable[..., Any]) -> ComputeFunction[..., Any]:
    """Return a @compute function unchanged, with its options; decorate any other function."""
    return function if isinstance(function, ComputeFunction) else compute(function)


def gather(*pendings: PendingCompute[Any], stream: bool = False, ordered: bool = True) -> PendingComputeGroup:
    """Group calls to run in parallel, like `a & b & c`.

    Args:
        pendings: The calls.
        stream: Make `>>` return an iterator instead of a tuple.
        ordered: With `stream`, yield values in the order of the calls (default) or of their completion.

    Raises:
        UsageError: An argument is not a pending call.

    Example:
        >>> @compute
        ... def square(x: int) -> int:
        ...     return x * x
        >>> len(gather(*[square(x) for x in range(10)]))
        10
    """
    for pending in pendings:
        if not isinstance(pending, PendingCompute):
            raise UsageError(f"gather(): {short(pending)} is not a pending call; {_for_gather(pending)}")
    return PendingComputeGroup(pendings, stream=stream, ordered=ordered)


def _for_gather(value: object) -> str:
    """Return advice for a value that is not a pending call."""
    if isinstance(value, PendingComputeGroup):
        return "join groups with &"
    if isinstance(value, StdFuture):
        return "read the value of this call with .result(), because it was sent already"
    if isinstance(value, Iterable):
        return "unpack several calls: sky.gather(*calls)"
    return "call a @compute function to make one"
