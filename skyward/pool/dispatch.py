"""Conversion of pending calls to tasks: packs the function and its arguments, and hands them to the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..calls.actor_handle import ActorMethod, actor_of_call, refuse_broadcast
from ..calls.futures import Failures, Future, followed, value_of
from ..calls.graphs import GraphRoot, Graphs, has_calls
from ..calls.options import CallOptions
from ..calls.pending import PendingCompute
from ..console.activity import Progress, ProgressBoard
from ..engine.builder import PackedCall, Place
from ..engine.engine import Engine
from ..engine.tasks import CallTask, HeldTask, PulledTask, ResultStream, Task, WireFunction
from ..errors import NotRun, UsageError
from ..wire.payloads import send_stays
from ..wire.seen import SeenArrays
from ..wire.tasks import CallKind, Mode, actor_place
from .actors import PoolActors
from .idle_streams import IdleStreams
from .packer import Packer, packed_launch
from .streams import WINDOW, FedCallTask, FedStreamTask, InputFeed, stop_feeds, take_inputs

_ALONE: Place = (0, 1, 0)


class Dispatch:
    """Creates tasks for one pool. Thread-safe."""

    def __init__(self, engine: Engine, pool: str, failures: Failures | None = None) -> None:
        self._engine = engine
        self._pool = pool
        self._builder = engine.builder
        self.idle_streams = IdleStreams(engine)
        # Bound once: a future holds each of them, and the garbage collector would visit one object per call.
        self._cancel, self._lead, self._why_waiting = engine.cancel, engine.leader.lead, self.idle_streams.why_waiting
        self.failures = failures
        self.packing = Packer()
        self.board = ProgressBoard()
        self.graphs = Graphs()
        self.actors = PoolActors(engine, self.packing, pool)

    def close(self) -> None:
        self.graphs.close()
        self.packing.close()

    def show_group(self, name: str, futures: list[Future[Any]]) -> None:
        """Let the console show how many of these calls are done."""
        progress = self.board.begin(Progress(name, len(futures)))
        for future in futures:
            future.add_done_callback(lambda _: progress.add(1))

    # Calls ----------------------------------------------------------------------------------------------------------

    def on_one_node(
        self,
        pending: PendingCompute[Any],
        *,
        nodes: tuple[int, ...] | None = None,
        is_strict: bool = False,
        leads: bool = False,
        seen: SeenArrays | None = None,
        failures: Failures | None = None,
    ) -> Future[Any]:
        """Send a call to one node and return a future of its value, or of an iterator for a generator function.

        Args:
            pending: The call.
            nodes: Nodes that it may go to; None for any node without a role.
            is_strict: Whether the future keeps the standard meaning: a running call cannot be cancelled.
            leads: Whether the caller waits at once and may read the channel itself. The future may be done on return.
            seen: Arrays that may have been sent before.
            failures: Counter of failures, for futures that users hold.
        """
        try:
            return self._send_to_one(
                pending, nodes=nodes, is_strict=is_strict, leads=leads, seen=seen, failures=failures
            )
        except NotRun:  # found out by failing, because a look at all arguments costs more than sending a small call
            if not has_calls((pending.args, pending.kwargs)):
                raise
        send = partial(self._send_to_one, nodes=nodes, is_strict=is_strict, seen=seen, failures=failures)
        (future,) = self._graph((pending,), nodes, send, is_strict=is_strict, failures=failures)
        return future

    def group(self, pendings: Sequence[PendingCompute[Any]], nodes: tuple[int, ...] | None) -> list[Future[Any]]:
        """Send the calls of a group. Calls among their arguments run once for the whole group."""
        if not any(has_calls((pending.args, pending.kwargs)) for pending in pendings):
            return [self.on_one_node(pending, nodes=nodes) for pending in pendings]
        return self._graph(pendings, nodes, partial(self._send_to_one, nodes=nodes))

    def on_each_node(self, pending: PendingCompute[Any], nodes: tuple[int, ...]) -> list[Future[Any]]:
        """Send a call to each node. Returns one future per node; for a gang, one future of the whole list.

        Waits for calls among the arguments.
        """
        try:
            return self._send_to_each(pending, nodes)
        except NotRun:
            if not has_calls((pending.args, pending.kwargs)):
                raise
        (resolved,) = self.graphs.resolve((pending,), partial(self._send_to_one, nodes=nodes))
        return self._send_to_each(value_of(resolved), nodes)

    def prepare_graphs(
        self, pendings: Sequence[PendingCompute[Any]], *, nodes: tuple[int, ...] | None
    ) -> list[GraphRoot]:
        """Prepare to run the calls among the arguments of these calls, for a map."""
        return self.graphs.prepare(pendings, partial(self._send_to_one, nodes=nodes))

    def _graph(
        self,
        pendings: Sequence[PendingCompute[Any]],
        nodes: tuple[int, ...] | None,
        send: Callable[[PendingCompute[Any]], Future[Any]],
        *,
        is_strict: bool = False,
        failures: Failures | None = None,
    ) -> list[Future[Any]]:
        """Send calls once the calls among their arguments have run."""
        resolved = self.graphs.resolve(pendings, partial(self._send_to_one, nodes=nodes))
        return [followed(future, send, is_strict=is_strict, failures=failures) for future in resolved]

    def _send_to_one(
        self,
        pending: PendingCompute[Any],
        *,
        nodes: tuple[int, ...] | None,
        is_strict: bool = False,
        leads: bool = False,
        seen: SeenArrays | None = None,
        failures: Failures | None = None,
    ) -> Future[Any]:
        options = pending.options
        kind, place = CallKind.PLAIN, _ALONE
        if isinstance(pending.fn, ActorMethod):
            kind, place, nodes = CallKind.ACTOR, actor_place(actor_of_call(pending.fn, options, self._pool)), None
        elif options.need is not None or options.nodes is not None:
            self.refuse_unfit(options, pending.name, nodes)
        if pending.fn.launch.is_gang or options.nodes is not None:
            return self._gang(pending, nodes=None, some_of=nodes, failures=failures)
        return self._call(
            pending,
            kind=kind,
            nodes=nodes,
            place=place,
            is_strict=is_strict,
            leads=leads,
            seen=seen,
            failures=failures,
        )

    def _send_to_each(self, pending: PendingCompute[Any], nodes: tuple[int, ...]) -> list[Future[Any]]:
        if isinstance(pending.fn, ActorMethod):
            refuse_broadcast(pending.name)
        if pending.options.nodes is not None:
            return [self._send_to_one(pending, nodes=nodes)]
        if pending.options.need is not None:
            self.refuse_unfit(pending.options, pending.name, nodes, len(nodes))
        if pending.fn.launch.is_gang:
            return [self._gang(pending, nodes=nodes)]
        return [
            self._call(pending, kind=CallKind.BROADCAST, nodes=(node,), place=(part, len(nodes), nodes[0]))
            for part, node in enumerate(nodes)
        ]

    def refuse_unfit(
        self, options: CallOptions, name: str, nodes: tuple[int, ...] | None, count: int | None = None
    ) -> None:
        """Raise UsageError if no node, or not enough of them, can ever hold a call with these options."""
        if why := self._engine.nodes.refusal(nodes, options.need, count or options.nodes or 1):
            raise UsageError(f"{name!r}: {why}")  # words: ok, schedule/reasons.py says what to do

    def _call(
        self,
        pending: PendingCompute[Any],
        *,
        kind: CallKind,
        nodes: tuple[int, ...] | None,
        place: Place = (0, 1, 0),
        is_strict: bool = False,
        leads: bool = False,
        seen: SeenArrays | None = None,
        failures: Failures | None = None,
    ) -> Future[Any]:
        engine, packing, options, name = self._engine, self.packing, pending.options, pending.name
        task_id = self._builder.next_id()
        args, kwargs, sources = pending.args, pending.kwargs, list[Iterator[Any]]()
        if pending.fn.iterator_parameters:
            args, kwargs, sources = take_inputs(pending.fn, args, kwargs)
        future: Future[Any] = Future(
            self._cancel,
            call_id=task_id,
            is_strict=is_strict,
            lead=None if leads else self._lead,
            failures=failures,
            why=self._why_waiting,
        )
        task: Task
        if sources or pending.fn.is_generator:
            _refuse_streams_that_stay(pending)
            _refuse_retries(pending, reads=bool(sources))
            payload = packing.arguments(args, kwargs, name, seen)
            call = PackedCall(name, self._function(pending), payload, options)
            task = self._streaming(pending, future, call, sources, kind, place)
        else:
            task = self._plain(pending, future, (args, kwargs), kind, nodes, place, leads=leads, seen=seen)
        if kind == CallKind.ACTOR:
            task.actor = task.head.actor
        if is_strict:
            task.in_bulk = False
        if leads and not sources:
            engine.leader.submit(task, future, nodes)
        else:
            engine.submit(task, nodes=nodes)
        return future

    def _plain(
        self,
        pending: PendingCompute[Any],
        future: Future[Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        kind: CallKind,
        nodes: tuple[int, ...] | None,
        place: Place,
        *,
        leads: bool,
        seen: SeenArrays | None,
    ) -> CallTask:
        """Make the task of a call that streams nothing."""
        packing, name = self.packing, pending.name
        may_stay = self._may_stay(pending, kind, nodes, leads=leads, may_hold=seen is None)
        payload = packing.arguments(*arguments, name, seen, may_stay=may_stay)
        if payload.stays and not leads:
            payload = packing.hold(payload)
        call = PackedCall(name, self._function(pending), payload, pending.options)
        if not payload.stays:
            return self._builder.task(CallTask, future.call_id, call, kind, place, mode=_mode(pending), future=future)
        make = partial(self._builder.task, task_id=future.call_id, call=call, kind=kind, place=place, future=future)
        stop_pulling = self._engine.leader.stop_pulling
        if leads:
            again = partial(self._call_again, pending, kind, nodes, place)
            return make(PulledTask, call_again=again, stop_pulling=stop_pulling)
        return make(HeldTask, call_again=partial(self._send_held, call, future), stop_pulling=stop_pulling)

    def _may_stay(
        self,
        pending: PendingCompute[Any],
        kind: CallKind,
        nodes: tuple[int, ...] | None,
        *,
        leads: bool,
        may_hold: bool,
    ) -> Callable[[int], bool] | None:
        """Return the function that tells whether a call's buffers may stay in this process's memory; None: never.

        They stay only while the caller waits, or as copies that are dropped with the call. A retry may come after that.
        """
        options = pending.options
        if options.allow_reruns or options.retry_on or options.need is not None or pending.is_kept:
            return None
        if leads:
            return self._engine.leader.may_pull
        return self._engine.leader.may_hold if may_hold and kind == CallKind.PLAIN and nodes is None else None

    def _function(self, pending: PendingCompute[Any]) -> WireFunction:
        method = pending.fn
        if not isinstance(method, ActorMethod):
            return self.packing.function(method, pending.name)
        if method.prototype.wire is None:
            method.prototype.wire = self.packing.function(method.fn, pending.name)
        wire: WireFunction = method.prototype.wire
        return wire

    def _call_again(
        self, pending: PendingCompute[Any], kind: CallKind, nodes: tuple[int, ...] | None, place: Place
    ) -> Any:
        """Send a call once more whose buffers could not stay in this process's memory, and wait for its value."""
        return value_of(self._call(pending, kind=kind, nodes=nodes, place=place))

    def _send_held(self, call: PackedCall, future: Future[Any]) -> None:
        """Send the call of a future whose buffers could not stay in this process's memory, as blobs."""
        sent = call._replace(payload=send_stays(call.payload, self.packing.put))
        task_id = future.call_id
        self._engine.submit(self._builder.task(CallTask, task_id, sent, CallKind.PLAIN, _ALONE, future=future))
        if future.cancelled():  # before the task was submitted
            self._cancel(task_id)

    def _streaming(
        self,
        pending: PendingCompute[Any],
        future: Future[Any],
        call: PackedCall,
        sources: list[Iterator[Any]],
        kind: CallKind,
        place: Place,
    ) -> Task:
        """Make a task that streams: in, from iterators among its arguments; out, from a generator function; or both."""
        engine, task_id, is_generator = self._engine, future.call_id, pending.fn.is_generator
        # A feed must not hold the future of a stream: the stream must become garbage when its reader drops it.
        failing = None if is_generator else future
        feeds = tuple(
            InputFeed(engine, task_id, lane, source, self.packing.put, failing) for lane, source in enumerate(sources)
        )
        make = partial(
            self._builder.task, task_id=task_id, call=call, kind=kind, place=place, inputs=len(feeds), feeds=feeds
        )
        if not is_generator:
            future.add_done_callback(lambda _: stop_feeds(feeds))
            return make(FedCallTask, future=future, may_move=False)
        stream: ResultStream[Any] = ResultStream(
            lambda count: engine.streams.grant(task_id, count),
            lambda: _close(engine.streams.close, task_id, feeds),
            lambda: _close(engine.abandon, task_id, feeds),
            2 if engine.streams.tells_each_item else WINDOW,
        )
        self.idle_streams.add(stream, pending.name)
        future.settle(stream)
        return make(FedStreamTask, mode=Mode.STREAM, window=WINDOW, stream=weakref.ref(stream), may_move=False)

    def _gang(
        self,
        pending: PendingCompute[Any],
        *,
        nodes: tuple[int, ...] | None,
        some_of: tuple[int, ...] | None = None,
        failures: Failures | None = None,
    ) -> Future[Any]:
        packing, launch, name = self.packing, pending.fn.launch, pending.name
        if pending.fn.is_generator:
            raise UsageError(
                f"{name!r}: is a generator function that runs as a gang, but ranks cannot stream; return the "
                "result, or print progress"
            )
        function = packing.function(pending.fn, name)
        call = PackedCall(name, function, packing.arguments(pending.args, pending.kwargs, name), pending.options)
        gang = self._builder.gang(
            call, launch, packed_launch(launch), nodes=nodes, some_of=some_of, mode=_mode(pending)
        )
        gang.future.failures = failures
        gang.future.why = self._why_waiting
        self._engine.submit_gang(gang)
        return gang.future


def _mode(pending: PendingCompute[Any]) -> Mode:
    return Mode.KEEP if pending.is_kept else Mode.CALL


def _close(close_stream: Callable[[int], None], task: int, feeds: tuple[InputFeed, ...]) -> None:
    """Close a stream whose reader is gone."""
    stop_feeds(feeds)
    close_stream(task)


def _refuse_streams_that_stay(pending: PendingCompute[Any]) -> None:
    """Refuse to keep the value of a generator function. Raises UsageError."""
    if pending.is_kept and pending.fn.is_generator:
        raise UsageError(
            f"{pending.name}(): a generator function streams its values, so they cannot stay on a node "
            "or be an argument of a call; return a list"
        )


def _refuse_retries(pending: PendingCompute[Any], *, reads: bool) -> None:
    """Refuse retries of a call that streams, because it can be sent only once. Raises UsageError."""
    options = pending.options
    if not (options.allow_reruns or options.retry_on):
        return
    field = "retries_on_loss" if options.retries_on_loss else "retries"
    if reads:
        raise UsageError(f"{field}: {pending.name!r} reads an iterator, which cannot be read twice; use {field}=0")
    raise UsageError(
        f"{field}: {pending.name!r} is a generator function, and its values cannot be taken back; set {field}=0, and "
        "call it again from where it stopped"
    )
