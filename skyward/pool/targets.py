"""Targets of calls on the client: sending to the nodes of an open pool, `map`, and the executor."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..calls.actor import PendingActor
from ..calls.actor_handle import ActorMethod
from ..calls.compute import as_compute
from ..calls.futures import Failures, Future, refuse_to_wait, value_of, values_of
from ..calls.pending import ComputeFunction, PendingCompute, PendingComputeGroup
from ..calls.target import CallTarget
from ..core import interrupts
from ..core.signatures import check_arguments
from ..core.user_lines import drop_our_frames
from ..errors import UsageError

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..wire.seen import SeenArrays
    from .dispatch import Dispatch
    from .map_run import Chunk, MapRun

T = TypeVar("T")


class PoolExecutor(concurrent.futures.Executor):
    """Standard `concurrent.futures.Executor` on a pool or some of its nodes. Made by `pool.executor()`.

    Its futures keep the standard meaning: a running call cannot be cancelled. `shutdown` ends the executor, not the
    pool. It is thread-safe and has a `with` block of its own. Like the standard executors, a program that ends without
    `shutdown` waits for its calls.

    Args:
        send: Function that sends a call. Its future must keep the standard meaning.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local()) as pool:
        ...     with pool.executor() as executor:
        ...         list(executor.map(abs, [-1, -2]))
        [1, 2]
    """

    def __init__(self, send: Callable[[PendingCompute[Any]], Future[Any]]) -> None:
        self._send = send
        self._futures: set[Future[Any]] = set()
        self._lock = threading.RLock()
        self._is_shut_down = False
        _open.add(self)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `fn(*args, **kwargs)` on one of the nodes and return its future.

        Args:
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            RuntimeError: The executor is shut down.
        """
        function = as_compute(fn)
        # As with the standard executors, wrong arguments become the future's error.
        pending: PendingCompute[T] = PendingCompute(function, args, kwargs, function.options)
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")  # words: ok, the standard text
            future: Future[T] = self._send(pending)
            self._futures.add(future)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Run a call for each item, as the standard executors do: read all input now, yield results in order.

        Args:
            fn: The function.
            iterables: Its arguments.
            timeout: Longest wait for a result, in seconds from now; None for no limit.
            chunksize: Number of calls that are sent together, >= 1.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")  # words: ok, the standard text
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        items = list(zip(*iterables, strict=False))
        chunks = [items[i : i + chunksize] for i in range(0, len(items), chunksize)]
        results = super().map(_call_each, [fn] * len(chunks), chunks, timeout=timeout)
        return _chained(results)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, and wait for the open ones.

        Args:
            wait: Whether to wait.
            cancel_futures: Cancel calls that have not begun.
        """
        with self._lock:
            self._is_shut_down = True
            futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            interrupts.wait_for(lambda slice_s: not concurrent.futures.wait(futures, slice_s).not_done)


def _call_each(fn: Callable[..., T], items: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*item) for item in items]


def _chained(results: Iterator[list[T]]) -> Iterator[T]:
    for chunk in results:
        yield from chunk


_open: weakref.WeakSet[PoolExecutor] = weakref.WeakSet()


def _shut_down_at_exit() -> None:
    for executor in list(_open):
        executor.shutdown()


atexit.register(_shut_down_at_exit)
os.register_at_fork(after_in_child=_open.clear)  # only the parent waits for these calls


def _methods_of(function: object) -> tuple[ActorMethod[..., Any], ...]:
    if not isinstance(function, ActorMethod | list | tuple):
        return ()
    from .actor_map import methods_of  # here, as in `_map_gangs`

    return methods_of(function)


class PoolSender:
    """Sends calls to some nodes of a pool; see `Sender`.

    Args:
        running: Function that returns the engine and the dispatch of the open pool. Raises PoolClosed.
        numbers: Function that returns the nodes that are there.
        is_whole: Whether calls to one node may go to any node without a role. False: only to one of `numbers`.
        slots: Number of plain calls that run on these nodes at once.
        max_inflight: Most calls of a map that are sent or running at once; None for two per slot.
        wake: Function that waits until a node is there, before a call is sent to that number of nodes at once.
    """

    def __init__(
        self,
        running: Callable[[], tuple[Engine, Dispatch]],
        numbers: Callable[[], tuple[int, ...]],
        *,
        is_whole: bool,
        slots: int,
        max_inflight: int | None,
        wake: Callable[[int], object],
    ) -> None:
        self._running = running
        self._numbers = numbers
        self._nodes = None if is_whole else numbers()
        self._wake = wake
        self._slots = slots
        self._max_inflight = max_inflight

    @property
    def numbers(self) -> tuple[int, ...]:
        return self._numbers()

    @property
    def slots(self) -> int:
        return self._slots

    def _ready_for(self, pending: PendingCompute[Any]) -> Dispatch:
        """Return the dispatch. A gang's number of ranks depends on the nodes, so a pool that rests comes back first."""
        dispatch = self._running()[1]
        if pending.fn.launch.is_gang or pending.options.nodes is not None:
            self._wake(pending.options.nodes or 1)
        return dispatch

    def run(self, pending: PendingCompute[T]) -> T:
        future: Future[T] = self._ready_for(pending).on_one_node(pending, nodes=self._nodes, leads=True)
        return value_of(future)

    def submit(self, pending: PendingCompute[T]) -> Future[T]:
        dispatch = self._ready_for(pending)
        return dispatch.on_one_node(pending, nodes=self._nodes, failures=dispatch.failures)

    def submit_strict(self, pending: PendingCompute[T]) -> Future[T]:
        """Send a call whose future keeps the standard meaning: a running call cannot be cancelled."""
        dispatch = self._ready_for(pending)
        return dispatch.on_one_node(pending, nodes=self._nodes, is_strict=True, failures=dispatch.failures)

    def submit_actor(self, pending: PendingActor[Any]) -> Future[Any]:
        """Make an actor on one of these nodes, and return a future of its handle."""
        dispatch = self._running()[1]
        self._wake(1)  # a pool that rests has no node for it
        return dispatch.actors.make(pending, self._nodes)

    def submit_parts(self, group: PendingComputeGroup) -> list[Future[Any]]:
        return self._running()[1].group(group.items, self._nodes)

    def submit_part(self, pending: PendingCompute[Any]) -> Future[Any]:
        return self._ready_for(pending).on_one_node(pending, nodes=self._nodes)

    def submit_sharing(self, pending: PendingCompute[T], seen: SeenArrays | None) -> Future[T]:
        """Send a call whose arrays may have been sent before."""
        return self._running()[1].on_one_node(pending, nodes=self._nodes, seen=seen)

    def broadcast(self, pending: PendingCompute[T]) -> list[T]:
        dispatch = self._running()[1]
        self._wake(len(self._numbers()))  # a pool that rests has no nodes for it to go to
        futures = dispatch.on_each_node(pending, self._numbers())
        if pending.fn.launch.is_gang or pending.options.nodes is not None:
            values: list[T] = value_of(futures[0])
            return values
        return values_of(futures)

    def show_group(self, group: PendingComputeGroup, futures: list[Future[Any]]) -> None:
        names = list(dict.fromkeys(pending.name for pending in group))
        name = " & ".join(names[:3]) + (" & ..." if len(names) > 3 else "")
        self._running()[1].show_group(name, futures)

    def failures(self) -> Failures | None:
        return self._running()[1].failures

    def require_open(self) -> None:
        """Raise PoolClosed if the pool is not open."""
        self._running()

    def map_run(
        self,
        fn: Any,
        iterables: tuple[Iterable[Any], ...],
        chunk: Chunk,
        ordered: bool,
        return_exceptions: bool,
        *,
        is_lazy: bool,
    ) -> MapRun:
        """Check the arguments of a map and prepare it. Raises UsageError."""
        engine, dispatch = self._running()
        from ..engine.builder import refuse_gang_options
        from .map_run import MapRun, check_chunk

        check_chunk(chunk)
        if not iterables:
            raise UsageError("map(): no arguments; pass at least one iterable")
        if not callable(fn):
            raise UsageError(f"map(): {fn!r} is not a function; pass a function first")
        function = as_compute(fn)
        if function.is_generator:
            raise UsageError(f"map(): {fn!r} is a generator function; return a list, or stream it: `fn(x) >> pool`")
        if function.launch.is_gang:
            raise UsageError(f"map(): {fn!r} is under an integration and runs as a gang; send it with `@ pool`")
        if not return_exceptions:
            check_arguments(function.fn, iterables, {})  # each item is one argument
        options = function.options
        name = options.name or function.__name__
        refuse_gang_options(options, name)
        if options.need is not None:
            dispatch.refuse_unfit(options, name, self._nodes)
        return MapRun(
            engine=engine,
            packing=dispatch.packing,
            function=function,
            sent_function=dispatch.packing.function(fn if isinstance(fn, ComputeFunction) else function.fn, name),
            name=name,
            prepare_graphs=partial(dispatch.prepare_graphs, nodes=self._nodes),
            iterables=iterables,
            slots=self._slots,
            nodes=self._nodes,
            chunk=chunk,
            ordered=ordered,
            return_exceptions=return_exceptions,
            is_lazy=is_lazy,
            board=dispatch.board,
            max_inflight=self._max_inflight,
        )


class PoolTarget(CallTarget):
    """Target of calls on nodes of a pool. Thread-safe."""

    _sender: PoolSender

    def _submit_parts(self, group: PendingComputeGroup) -> list[Future[Any]]:
        futures = self._sender.submit_parts(group)
        if len(futures) > 1:
            self._sender.show_group(group, futures)
        return futures

    def make_actor(self, pending: PendingActor[T]) -> T:
        """Make an actor and return its handle: `pending >> pool`."""
        refuse_to_wait("`>> pool`")
        handle: T = value_of(self._sender.submit_actor(pending))
        return handle

    def submit_actor(self, pending: PendingActor[T]) -> Future[T]:
        """Make an actor and return a future of its handle: `pending > pool`."""
        return self._sender.submit_actor(pending)

    def submit_sharing(self, pending: PendingCompute[T], seen: SeenArrays | None) -> Future[T]:
        """Submit a call for integrations that send the same arrays many times; see SeenArrays."""
        return self._sender.submit_sharing(pending, seen)

    @overload
    def map(
        self,
        fn: ComputeFunction[..., T] | Sequence[ComputeFunction[..., T]],
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
        fn: Callable[..., Any] | Sequence[ComputeFunction[..., Any]],
        *iterables: Iterable[Any],
        chunk: Chunk = "auto",
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Return `[fn(*args) for args in zip(*iterables)]`, computed on all slots.

        Args:
            fn: Plain or @compute function. The options of a @compute function apply to each call. Or a method of an
                actor, or a list of methods of several actors, which share the items.
            iterables: Arguments of the calls.
            chunk: Number of calls that are sent together, >= 1. "auto" measures the calls and decides.
            ordered: Return values in the order of the input. False: in the order of completion.
            return_exceptions: Put the exception of a failed call in the place of its value. Otherwise the first error
                is raised and the other calls are cancelled. Errors of the input are always raised.

        Raises:
            UsageError: The function or an option is not suitable for a map.
            Exception: The first exception of the function, as itself.

        Example:
            >>> import skyward as sky
            >>> with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
            ...     pool.map(pow, [2, 3], [3, 2])
            [8, 9]
        """
        if isinstance(fn, ComputeFunction) and fn.options.nodes is not None:
            return list(self._map_gangs(fn, iterables, ordered, return_exceptions))
        try:
            if methods := _methods_of(fn):
                return list(self._map_actors(methods, iterables, chunk, ordered, return_exceptions))
            run = self._sender.map_run(fn, iterables, chunk, ordered, return_exceptions, is_lazy=False)
            values: list[Any] = []
            with contextlib.closing(run.lists()) as lists:
                for ready in lists:
                    values += ready
            return values
        except Exception as error:
            drop_our_frames(error)
            raise

    @overload
    def imap(
        self,
        fn: ComputeFunction[..., T] | Sequence[ComputeFunction[..., T]],
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
        fn: Callable[..., Any] | Sequence[ComputeFunction[..., Any]],
        *iterables: Iterable[Any],
        chunk: Chunk = "auto",
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Iterator[Any]:
        """Return an iterator of a map's values. The input is read as values are consumed, so it may be endless.

        Closing or dropping the iterator cancels its open calls.

        Args:
            fn: Plain or @compute function. The options of a @compute function apply to each call. Or a method of an
                actor, or a list of methods of several actors, which share the items.
            iterables: Arguments of the calls.
            chunk: Number of calls that are sent together, >= 1. "auto" measures the calls and decides.
            ordered: Yield values in the order of the input. False: in the order of completion.
            return_exceptions: Yield the exception of a failed call in the place of its value.

        Example:
            for value in pool.imap(transform, read_forever()):
                write(value)
        """
        if isinstance(fn, ComputeFunction) and fn.options.nodes is not None:
            return self._map_gangs(fn, iterables, ordered, return_exceptions)
        if methods := _methods_of(fn):
            return self._map_actors(methods, iterables, chunk, ordered, return_exceptions)
        return self._sender.map_run(fn, iterables, chunk, ordered, return_exceptions, is_lazy=True).results()

    def _map_actors(
        self,
        methods: tuple[ActorMethod[..., Any], ...],
        iterables: tuple[Iterable[Any], ...],
        chunk: Chunk,
        ordered: bool,
        return_exceptions: bool,
    ) -> Iterator[Any]:
        if chunk != "auto":
            raise UsageError(
                f"chunk={chunk!r}: calls of an actor are sent one by one; leave it out", field="chunk", value=chunk
            )
        if not iterables:
            raise UsageError("map(): no arguments; pass at least one iterable")
        self._sender.require_open()
        send = self._sender.submit_part
        from .actor_map import map_actors  # here, as in `_map_gangs`: few pools need it

        return map_actors(send, methods, iterables, ordered=ordered, return_exceptions=return_exceptions)

    def _map_gangs(
        self,
        fn: ComputeFunction[..., Any],
        iterables: tuple[Iterable[Any], ...],
        ordered: bool,
        return_exceptions: bool,
    ) -> Iterator[Any]:
        from .gang_map import map_gangs

        calls = (fn(*items) for items in zip(*iterables, strict=False))
        return map_gangs(calls, self._sender.submit_part, ordered=ordered, return_exceptions=return_exceptions)

    def executor(self) -> PoolExecutor:
        """Return a standard `concurrent.futures.Executor` on these nodes. Raises PoolClosed.

        Example:
            with pool.executor() as executor:
                futures = [executor.submit(transform, item) for item in items]
        """
        self._sender.require_open()
        return PoolExecutor(self._sender.submit_strict)
