"""A target of calls: what a pool, some of its nodes and a handle in a task have in common.

How calls are sent differs, and is a `Sender`: of an open pool, or of a task that calls by its node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future as StdFuture
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, TypeVar, overload

from ..core.signatures import name_of
from ..core.spellings import advice
from ..core.unrun import Unrun, short
from ..errors import UsageError
from .compute import ComputeFunction, PendingCompute, PendingComputeGroup, pending_of
from .futures import Failures, Future, joined, streamed, values_of

__all__ = ["CallTarget", "Sender", "refuse_operand"]


P = ParamSpec("P")
T = TypeVar("T")


class Sender(Protocol):
    """Sends calls to some nodes. Thread-safe. Each method but the properties raises PoolClosed."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The nodes that a broadcast goes to, in this order."""
        ...

    @property
    def slots(self) -> int:
        """Plain calls that run there at once."""
        ...

    def run(self, pending: PendingCompute[T], /) -> T:
        """Send a call to one of the nodes and wait for its value."""
        ...

    def submit(self, pending: PendingCompute[T], /) -> Future[T]:
        """Send a call to one of the nodes."""
        ...

    def submit_part(self, pending: PendingCompute[Any], /) -> Future[Any]:
        """Send a call of a group, whose own future is the one that users hold."""
        ...

    def broadcast(self, pending: PendingCompute[T], /) -> list[T]:
        """Send a call to each of the nodes and wait for all."""
        ...

    def failures(self) -> Failures | None:
        """Where the failure of a future that users hold is counted."""
        ...


class CallTarget:
    """Nodes that calls can be sent to. Thread-safe."""

    _sender: Sender

    @property
    def node_numbers(self) -> tuple[int, ...]:
        """The nodes that calls go to: `@` sends to each of them, in this order. Of a pool: those without a role."""
        return self._sender.numbers

    @property
    def total_slots(self) -> int:
        """Plain calls that run on these nodes at once: their number x concurrency.

        Of a pool these are the nodes that are kept for no role; `pool.role(name).total_slots` is how many run in a
        role. In a task the calls of others, and the task's own, count too.
        """
        return self._sender.slots

    @overload
    def run(self, call: PendingCompute[T], /) -> T: ...
    @overload
    def run(self, call: ComputeFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def run(
        self, call: PendingCompute[T] | ComputeFunction[..., T] | Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> T:
        """Run the call on one of the nodes and wait for its value: `pending >> pool`.

        It takes a pending call, or a function and its arguments: `pool.run(f(3))` and `pool.run(f, 3)` are the same.
        A generator function gives an iterator of what it yields. Ctrl-C stops the call.

        Raises:
            Whatever the function raised, as itself; NodeLost, SlotLost, TaskTimeout, TaskError.
        """
        pending: PendingCompute[T] = pending_of(call, args, kwargs)
        return self._sender.run(pending)

    @overload
    def submit(self, call: PendingCompute[T], /) -> Future[T]: ...
    @overload
    def submit(self, call: ComputeFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    @overload
    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def submit(
        self, call: PendingCompute[T] | ComputeFunction[..., T] | Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> Future[T]:
        """Run the call on one of the nodes; a future of its value: `pending > pool`. It takes what `run` takes."""
        pending: PendingCompute[T] = pending_of(call, args, kwargs)
        return self._sender.submit(pending)

    @overload
    def broadcast(self, call: PendingCompute[T], /) -> list[T]: ...
    @overload
    def broadcast(self, call: ComputeFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    @overload
    def broadcast(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    def broadcast(
        self, call: PendingCompute[T] | ComputeFunction[..., T] | Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> list[T]:
        """Run the call on each of the nodes and wait for all: values in the order of the nodes: `pending @ pool`.

        It takes what `run` takes.
        Under an integration the nodes form a gang, and a node's value is that of its first rank. If one call fails
        the others are stopped.
        """
        pending: PendingCompute[T] = pending_of(call, args, kwargs)
        return self._sender.broadcast(pending)

    def run_group(self, group: PendingComputeGroup) -> Any:
        """Run the calls in parallel: a tuple of values, or an iterator if the group streams."""
        futures = [self._sender.submit_part(pending) for pending in group]
        if group.stream:
            return streamed(futures, ordered=group.ordered)
        return tuple(values_of(futures))

    def submit_group(self, group: PendingComputeGroup) -> Future[tuple[Any, ...]]:
        """A future of the tuple of values. Cancelling it cancels all calls."""
        failures = self._sender.failures()
        return joined([self._sender.submit_part(pending) for pending in group], failures)

    async def run_async(
        self, call: PendingCompute[T] | PendingComputeGroup | Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> Any:
        """`run` for asyncio: the event loop goes on meanwhile, and cancelling the await stops the call.

        It sends nothing before it is awaited. For a future without asyncio there is `submit`.
        """
        future: Future[Any]
        if isinstance(call, PendingComputeGroup):
            future = self.submit_group(call)
        else:
            future = self.submit(pending_of(call, args, kwargs))
        return await asyncio.wrap_future(future)

    if not TYPE_CHECKING:  # a checker is to find these mistakes itself
        __array_ufunc__ = None  # an array leaves the operator to us, instead of trying it with each element

        def __rrshift__(self, value: object) -> NoReturn:
            refuse_operand(value, ">>")

        def __rmatmul__(self, value: object) -> NoReturn:
            refuse_operand(value, "@")

        def __lt__(self, value: object) -> NoReturn:
            refuse_operand(value, ">")

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                known = [member for member in dir(type(self)) if not member.startswith("_")]
                text = f"{text}; {advice('pool', name, known, shown='{}')}"
            raise AttributeError(text, name=name, obj=self)


def refuse_operand(value: object, operator: str) -> NoReturn:
    """Raise UsageError for `value operator target`, because the value is not a call."""
    raise UsageError(f"`{operator}`: {_problem(value, operator)}")


def _problem(value: Any, operator: str) -> str:
    if isinstance(value, ComputeFunction):
        return f"{value.__name__} is a function that was not called; write {value.__name__}(...) {operator} pool"
    if isinstance(value, list | tuple) and value and all(isinstance(item, Unrun) for item in value):
        return f"a {type(value).__name__} of {len(value)} calls; write sky.gather(*calls) >> pool"
    if isinstance(value, StdFuture):
        return "the call of this future was sent already; its value is .result()"
    if callable(value):
        name = name_of(value)
        return f"{name} is a function, not a call of one; write sky.compute({name})(...) {operator} pool"
    return (
        f"{short(value)} is a value ({type(value).__name__}), not a call. A function without @sky.compute runs "
        f"here and at once: decorate it, or write pool.submit(function, ...)"
    )
