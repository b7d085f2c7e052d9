"""Where calls are sent: the nodes of a pool, or some of them (`pool.node(1)`, `pool.nodes([0, 2])`, `pool.role("x")`).

What a pool and a part of it have in common is `Calls`: the operators' methods, map and executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from .calls import ComputeFunction, PendingCompute, PendingComputeGroup, as_compute, pending_of
from .cluster.builder import refuse_gang_options
from .cluster.engine import Engine
from .dispatch import Dispatch
from .errors import UsageError
from .executor import PoolExecutor
from .futures import Future
from .mapping import Chunk, MapRun, check_chunk
from .operands import TargetOperators
from .signatures import check_arguments
from .slot.handle import TargetHandle
from .user_lines import drop_our_frames
from .waiting import joined, streamed, value_of, values_of
from .wire.seen import SeenArrays

if TYPE_CHECKING:
    from .pool import ComputePool

__all__ = ["Calls", "NodeCount", "NodeTarget", "checked_nodes", "checked_roles"]

P = ParamSpec("P")
T = TypeVar("T")


class Calls(TargetOperators, ABC):
    """Calls to nodes of an open pool. Thread-safe."""

    @property
    @abstractmethod
    def node_numbers(self) -> tuple[int, ...]:
        """The nodes that calls go to: `@` sends to each of them, in this order."""

    @property
    @abstractmethod
    def _goes_to(self) -> tuple[int, ...] | None:
        """`node_numbers`, or None for those that are kept for no role."""

    @property
    @abstractmethod
    def total_slots(self) -> int:
        """Plain calls that run here at once."""

    @property
    @abstractmethod
    def _max_inflight(self) -> int | None: ...

    @abstractmethod
    def _running(self) -> tuple[Engine, Dispatch]:
        """Raises PoolClosed."""

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
        _, dispatch = self._running()
        future: Future[T] = dispatch.on_one_node(pending, nodes=self._goes_to, leads=True)
        return value_of(future)

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
        _, dispatch = self._running()
        return dispatch.on_one_node(pending, nodes=self._goes_to, failures=dispatch.failures)

    def _submit_strict(self, pending: PendingCompute[T]) -> Future[T]:
        _, dispatch = self._running()
        return dispatch.on_one_node(pending, nodes=self._goes_to, is_strict=True, failures=dispatch.failures)

    def _submit_part(self, pending: PendingCompute[Any]) -> Future[Any]:
        """Of a group, whose own future is the one that users hold."""
        return self._running()[1].on_one_node(pending, nodes=self._goes_to)

    def submit_sharing(self, pending: PendingCompute[T], seen: SeenArrays | None) -> Future[T]:
        """`submit` for integrations that send the same arrays many times; see SeenArrays."""
        return self._running()[1].on_one_node(pending, nodes=self._goes_to, seen=seen)

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
        pending = pending_of(call, args, kwargs)
        futures = self._running()[1].on_each_node(pending, self.node_numbers)
        if pending.fn.launch.is_gang:
            values: list[T] = value_of(futures[0])
            return values
        return values_of(futures)

    def run_group(self, group: PendingComputeGroup) -> Any:
        """Run the calls in parallel: a tuple of values, or an iterator if the group streams."""
        futures = [self._submit_part(pending) for pending in group]
        if group.stream:
            return streamed(futures, ordered=group.ordered)
        return tuple(values_of(futures))

    def submit_group(self, group: PendingComputeGroup) -> Future[tuple[Any, ...]]:
        """A future of the tuple of values. Cancelling it cancels all calls."""
        _, dispatch = self._running()
        return joined([self._submit_part(pending) for pending in group], dispatch.failures)

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

    @overload
    def map(
        self,
        fn: ComputeFunction[..., T],
        *iterables: Iterable[Any],
        chunk: Chunk = "auto",
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> list[T]: ...
    @overload
    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        chunk: Chunk = "auto",
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> list[T]: ...
    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        chunk: Chunk = "auto",
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """`[fn(*args) for args in zip(*iterables)]` on all slots.

        Args:
            fn: a plain or a @compute function; the options of the latter hold for each call.
            chunk: calls that are sent together; "auto" measures how long they take and chooses.
            ordered: values in the order of the input; False: as they come.
            return_exceptions: a call that raises has its exception in the place of its value. Otherwise the first
                error is raised and the other calls are cancelled. An error of the input is always raised.
        """
        run = self._map(fn, iterables, chunk, ordered, return_exceptions, is_lazy=False)
        try:
            with contextlib.closing(run.lists()) as lists:
                return list(itertools.chain.from_iterable(lists))
        except Exception as error:
            drop_our_frames(error)
            raise

    @overload
    def imap(
        self,
        fn: ComputeFunction[..., T],
        *iterables: Iterable[Any],
        chunk: Chunk = "auto",
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Iterator[T]: ...
    @overload
    def imap(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        chunk: Chunk = "auto",
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Iterator[T]: ...
    def imap(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        chunk: Chunk = "auto",
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Iterator[Any]:
        """`map` as an iterator: the input is read as results are consumed, so it may be endless.

        Closing the iterator (or dropping it) cancels what is on its way.
        """
        return self._map(fn, iterables, chunk, ordered, return_exceptions, is_lazy=True).results()

    def _map(
        self,
        fn: Callable[..., Any],
        iterables: tuple[Iterable[Any], ...],
        chunk: Chunk,
        ordered: bool,
        return_exceptions: bool,
        *,
        is_lazy: bool,
    ) -> MapRun:
        engine, dispatch = self._running()
        check_chunk(chunk)
        if not iterables:
            raise UsageError("map: give at least one iterable of arguments")
        if not callable(fn):
            raise UsageError(f"map: {fn!r} is not a function")
        function = as_compute(fn)
        if function.is_generator:
            raise UsageError(f"map: {fn!r} is a generator function; return a list, or stream it: `fn(x) >> pool`")
        if function.launch.is_gang:
            raise UsageError(f"map: {fn!r} is under an integration, which makes a gang; use `@ pool` for those")
        if not return_exceptions:
            check_arguments(function.fn, iterables, {})  # each item is one argument
        options = function.options
        name = options.name or function.__name__
        refuse_gang_options(options, name)
        return MapRun(
            engine=engine,
            packing=dispatch.packing,
            function=dispatch.packing.function(fn if isinstance(fn, ComputeFunction) else function.fn, name),
            name=name,
            options=options,
            iterables=iterables,
            slots=self.total_slots,
            nodes=self._goes_to,
            chunk=chunk,
            ordered=ordered,
            return_exceptions=return_exceptions,
            is_lazy=is_lazy,
            max_inflight=self._max_inflight,
        )

    def executor(self) -> PoolExecutor:
        """A standard `concurrent.futures.Executor` on these nodes."""
        self._running()
        return PoolExecutor(self._submit_strict)


class NodeTarget(Calls):
    """Some nodes of a pool, as a target of calls: `f(x) >> pool.node(1)`. Made by a pool; lives no longer than it.

    `>>` and `>` send to one of these nodes, whichever has room; `@` to each of them, in the order in which they were
    named. A function under an integration runs as a gang on one of them, or on all. `map` and `executor` use their
    slots and no others.

    A call to these nodes waits for them and goes to no other. When such a node is lost, a call that had been sent to
    it fails with NodeLost, unless its `retries` allow another run; one that had not been sent waits for the machine
    that takes the node's place. If no machine does, calls that could go to that node only fail with NodeLost.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        ...     node = pool.node(1)
        ...     sky.compute(lambda: sky.instance_info().node)() >> node
        1
    """

    def __init__(self, pool: ComputePool, nodes: tuple[int, ...], label: str) -> None:
        self._pool = pool
        self._nodes = nodes
        self._label = label

    @property
    def pool(self) -> ComputePool:
        """The pool that they belong to."""
        return self._pool

    @property
    def node_numbers(self) -> tuple[int, ...]:
        return self._nodes

    @property
    def _goes_to(self) -> tuple[int, ...]:
        return self._nodes

    @property
    def total_slots(self) -> int:
        """Plain calls that run on these nodes at once: their number x concurrency."""
        return len(self._nodes) * self._pool.concurrency

    @property
    def _max_inflight(self) -> int | None:
        return self._pool._max_inflight

    def _running(self) -> tuple[Engine, Dispatch]:
        return self._pool._running()

    def __reduce__(self) -> tuple[Any, ...]:
        """In a call's arguments it becomes a handle, which is a target of calls there; see `TargetHandle`."""
        return TargetHandle, (self._pool.job_id, self._nodes, False, self._label, self.total_slots)

    def __repr__(self) -> str:
        return f"<{self._label} of {self._pool!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeTarget) and (other._pool is self._pool) and other._nodes == self._nodes

    def __hash__(self) -> int:
        return hash((id(self._pool), self._nodes))


class NodeCount(int):
    """`pool.nodes` is how many nodes there are, and may be called: `pool.nodes([0, 2])` is those two of them."""

    _pool: ComputePool

    def __new__(cls, count: int, pool: ComputePool) -> Self:
        made = super().__new__(cls, count)
        made._pool = pool
        return made

    def __call__(self, numbers: Iterable[int]) -> NodeTarget:
        """Those nodes, as a target of calls; each number in [0, nodes), at least one and none twice.

        Raises UsageError.
        """
        chosen = checked_nodes("nodes", numbers, int(self))
        return NodeTarget(self._pool, chosen, f"nodes {', '.join(map(str, chosen))}")

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def checked_nodes(field: str, numbers: Iterable[int], count: int) -> tuple[int, ...]:
    """The numbers, if they are nodes of a pool of `count`. Raises UsageError, which names the field."""
    if isinstance(numbers, str | bytes) or not isinstance(numbers, Iterable):
        raise UsageError(f"{field}: {numbers!r}; it is a list of numbers of nodes, such as [0, 2]", field=field)
    chosen = tuple(numbers)
    if not chosen:
        raise UsageError(f"{field}: {numbers!r}; name at least one node", field=field)
    for number in chosen:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            there = "node 0 only" if count == 1 else f"nodes 0 to {count - 1}"
            raise UsageError(f"{field}: there is no node {number!r}; the pool has {there}", field=field)
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"{field}: {list(chosen)!r}; a node is named twice", field=field)
    return chosen


def checked_roles(roles: Mapping[str, Sequence[int]] | None, count: int) -> dict[str, tuple[int, ...]]:
    """Which nodes of a pool of `count` are kept for which role. Raises UsageError."""
    if roles is None:
        return {}
    if not isinstance(roles, Mapping):
        raise UsageError(f"roles: {roles!r}; it is a dict from names to numbers of nodes", field="roles")
    checked: dict[str, tuple[int, ...]] = {}
    role_of: dict[int, str] = {}
    for name, numbers in roles.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"roles: {name!r}; the name of a role is text that is not empty", field="roles")
        checked[name] = checked_nodes(f"roles[{name!r}]", numbers, count)
        for number in checked[name]:
            if number in role_of:
                raise UsageError(
                    f"roles: node {number} is in {role_of[number]!r} and in {name!r}; a node has one role",
                    field="roles",
                )
            role_of[number] = name
    if len(role_of) == count:
        raise UsageError(
            f"roles: all {count} nodes have one, so none is left for ordinary calls (`>> pool`, map); "
            "leave one out, or make more nodes",
            field="roles",
        )
    return checked
