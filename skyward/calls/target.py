"""Common base of call targets: a pool, some of its nodes, and a handle inside a task.

The way that calls are sent differs, and is a `Sender`: one for an open pool, one for a task that calls through its
node.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as StdFuture
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, TypeVar, overload

from ..core.signatures import name_of
from ..core.spellings import no_attribute
from ..core.unrun import Unrun, short
from ..errors import UsageError
from ..values.launch import RankValues
from .compute import pending_of
from .futures import Failures, Future, joined, streamed, values_of
from .needs import check_node_count
from .pending import ComputeFunction, PendingCompute, PendingComputeGroup

P = ParamSpec("P")
T = TypeVar("T")


class Sender(Protocol):
    """Sends calls to some nodes. Thread-safe. All methods, but not the properties, raise PoolClosed."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Nodes of a broadcast, in this order."""
        ...

    @property
    def slots(self) -> int:
        """Number of plain calls that run there at once."""
        ...

    def run(self, pending: PendingCompute[T], /) -> T:
        """Send a call to one of the nodes and wait for its value."""
        ...

    def submit(self, pending: PendingCompute[T], /) -> Future[T]:
        """Send a call to one of the nodes."""
        ...

    def submit_part(self, pending: PendingCompute[Any], /) -> Future[Any]:
        """Send a call of a group. Users hold the future of the group, not this one."""
        ...

    def broadcast(self, pending: PendingCompute[T], /) -> list[T]:
        """Send a call to each of the nodes and wait for all."""
        ...

    def failures(self) -> Failures | None:
        """Return the counter of failed futures that users hold, or None."""
        ...


class CallTarget:
    """Nodes that calls can be sent to. Thread-safe."""

    _sender: Sender

    @property
    def node_numbers(self) -> tuple[int, ...]:
        """Nodes that calls go to; `@` sends to each, in this order. For a pool: the nodes without a role."""
        return self._sender.numbers

    @property
    def total_slots(self) -> int:
        """Number of plain calls that run on these nodes at once: nodes x concurrency.

        For a pool, only nodes without a role count; `pool.role(name).total_slots` counts those of a role. In a task,
        calls of others and the task itself use slots too.
        """
        return self._sender.slots

    def any(self, count: int) -> AnyNodes:
        """Return any `count` of these nodes as a target: `f(x) @ pool.any(2)` is a gang on the first two that are free.

        Args:
            count: Number of nodes, >= 1.

        Raises:
            UsageError: The number is illegal. A call that needs more nodes than there are is refused when it is sent.

        Example:
            future = train(data) > pool.any(2)
            print(future.why_waiting)
        """
        check_node_count(count)
        return AnyNodes(self, count)

    @overload
    def run(self, call: PendingCompute[T], /) -> T: ...
    @overload
    def run(self, call: ComputeFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def run(
        self, call: PendingCompute[T] | ComputeFunction[..., T] | Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> T:
        """Run a call on one of the nodes and wait for its value: `pending >> pool`.

        Takes a pending call, or a function and its arguments: `pool.run(f(3))` and `pool.run(f, 3)` are the same.
        Ctrl-C cancels the call.

        Args:
            call: A pending call, or a function.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            The value. A generator function returns an iterator of the values that it yields.

        Raises:
            NodeError: A node or slot was lost: NodeLost or SlotLost.
            TaskError: The call timed out, or its value cannot be sent.
            PoolClosed: The pool is not open.
            Exception: Any exception of the function, as itself.
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
        """Run a call on one of the nodes and return a future of its value: `pending > pool`.

        Args:
            call: A pending call, or a function.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.
        """
        pending: PendingCompute[T] = pending_of(call, args, kwargs)
        return self._sender.submit(pending)

    @overload
    def broadcast(self, call: PendingCompute[RankValues[T]], /) -> RankValues[T]: ...
    @overload
    def broadcast(
        self, call: ComputeFunction[P, RankValues[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RankValues[T]: ...
    @overload
    def broadcast(self, call: PendingCompute[T], /) -> list[T]: ...
    @overload
    def broadcast(self, call: ComputeFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    @overload
    def broadcast(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    def broadcast(
        self, call: PendingCompute[Any] | ComputeFunction[..., Any] | Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Run a call on each of the nodes and wait for all values, in the order of the nodes: `pending @ pool`.

        Under an integration, the nodes form a gang, and the value of a node is that of its first rank. The option
        `returns` of the integration changes that: "ranks" returns the values of all ranks, "head" only that of rank 0,
        as a list of one. If one call fails, the others are cancelled.

        Args:
            call: A pending call, or a function.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.
        """
        return self._sender.broadcast(pending_of(call, args, kwargs))

    def run_group(self, group: PendingComputeGroup) -> Any:
        """Run calls in parallel. Returns a tuple of values, or an iterator if the group streams."""
        futures = self._submit_parts(group)
        if group.stream:
            return streamed(futures, ordered=group.ordered)
        return tuple(values_of(futures))

    def submit_group(self, group: PendingComputeGroup) -> Future[tuple[Any, ...]]:
        """Run calls in parallel and return a future of the tuple of values. Cancelling it cancels all calls."""
        failures = self._sender.failures()
        return joined(self._submit_parts(group), failures)

    def _submit_parts(self, group: PendingComputeGroup) -> list[Future[Any]]:
        return [self._sender.submit_part(pending) for pending in group]

    async def run_async(
        self, call: PendingCompute[T] | PendingComputeGroup | Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a call like `run`, from asyncio. The event loop keeps running, and cancelling the await cancels the call.

        Nothing is sent before the coroutine is awaited. Without asyncio, use `submit`.

        Args:
            call: A pending call, a group, or a function.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.
        """
        future: Future[Any]
        if isinstance(call, PendingComputeGroup):
            future = self.submit_group(call)
        else:
            future = self.submit(pending_of(call, args, kwargs))
        import asyncio  # a program that awaits has it; others need not wait for it

        return await asyncio.wrap_future(future)

    if not TYPE_CHECKING:  # type checkers must find these mistakes themselves
        __array_ufunc__ = None  # makes numpy leave the operator to us instead of applying it to each element

        def __rrshift__(self, value: object) -> NoReturn:
            refuse_operand(value, ">>")

        def __rmatmul__(self, value: object) -> NoReturn:
            refuse_operand(value, "@")

        def __lt__(self, value: object) -> NoReturn:
            refuse_operand(value, ">")

        def __getattr__(self, name: str) -> NoReturn:
            known = [member for member in dir(type(self)) if not member.startswith("_")]
            raise no_attribute(self, name, "pool", known)


class AnyNodes(CallTarget):
    """A number of any nodes of a target. Made by `pool.any(count)`; valid while the pool is.

    Every call runs as a gang, on nodes that are chosen when enough of them are free. Its value is the list of those of
    the nodes, with each of `>>`, `>` and `@`. A plain function then runs in a new process on each node.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        ...     sorted(sky.compute(lambda: sky.instance_info().node)() @ pool.any(2))
        [0, 1]
    """

    def __init__(self, target: CallTarget, count: int) -> None:
        self._target = target
        self._count = count
        self._sender = AnySender(target._sender, count)

    @property
    def gang_size(self) -> int:
        """Number of nodes of each call."""
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        return AnyNodes, (self._target, self._count)

    def __repr__(self) -> str:
        return f"<any {self._count} nodes of {self._target!r}>"

    def _submit_parts(self, group: PendingComputeGroup) -> list[Future[Any]]:
        return self._target._submit_parts(group.with_options(nodes=self._count))


class AnySender:
    """Sends calls with the option `nodes`; see `Sender`."""

    def __init__(self, sender: Sender, count: int) -> None:
        self._sender = sender
        self._count = count

    @property
    def numbers(self) -> tuple[int, ...]:
        return self._sender.numbers

    @property
    def slots(self) -> int:
        return self._sender.slots

    def run(self, pending: PendingCompute[T]) -> T:
        return self._sender.run(self._widened(pending))

    def submit(self, pending: PendingCompute[T]) -> Future[T]:
        return self._sender.submit(self._widened(pending))

    def submit_part(self, pending: PendingCompute[Any]) -> Future[Any]:
        return self._sender.submit_part(self._widened(pending))

    def broadcast(self, pending: PendingCompute[T]) -> list[T]:
        return self._sender.broadcast(self._widened(pending))

    def failures(self) -> Failures | None:
        return self._sender.failures()

    def _widened(self, pending: PendingCompute[T]) -> PendingCompute[T]:
        """Return the call for some nodes. To type checkers its value stays that of one node."""
        if pending.options.nodes not in (None, self._count):
            raise UsageError(
                f"nodes={pending.options.nodes}: {short(pending)} has its number of nodes, and was sent to any "
                f"{self._count}; say it once",
                field="nodes",
                value=pending.options.nodes,
            )
        widened: PendingCompute[Any] = pending.with_options(nodes=self._count)
        return widened


def refuse_operand(value: object, operator: str) -> NoReturn:
    """Raise UsageError for `value operator target`, because the value is not a call."""
    raise UsageError(f"`{operator}`: {_problem(value, operator)}")


def _problem(value: Any, operator: str) -> str:
    if isinstance(value, ComputeFunction):
        return f"{value.__name__} is a function that was not called; write {value.__name__}(...) {operator} pool"
    if isinstance(value, list | tuple) and value and all(isinstance(item, Unrun) for item in value):
        return f"a {type(value).__name__} of {len(value)} calls; write sky.gather(*calls) >> pool"
    if isinstance(value, StdFuture):
        return "the call of this future was sent already; read its value with .result()"
    if callable(value):
        name = name_of(value)
        return f"{name} is a function, not a call of one; write sky.compute({name})(...) {operator} pool"
    return (
        f"{short(value)} is a value ({type(value).__name__}), not a call: without @sky.compute, a function runs here "
        "and at once; decorate it, or write pool.submit(function, ...)"
    )
