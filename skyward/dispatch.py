"""From a pending call to tasks: pickles the function and its arguments, and hands them to the engine."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import Future as StdFuture
from dataclasses import dataclass
from typing import Any

from .calls import CallOptions, PendingCompute
from .cluster.engine import Engine
from .cluster.functions import FunctionTable
from .cluster.gang import Gang
from .cluster.nested import refuse_gang_options
from .cluster.tasks import CallTask, PulledTask, Received, ResultStream, StreamTask, Task, TaskFailure, WireFunction
from .errors import ArgumentNotPicklable, UsageError
from .futures import Future
from .launch import Launch
from .streams import WINDOW, InputFeed, take_inputs
from .wire.blobs import BlobStore
from .wire.payloads import Encoded, encode
from .wire.seen import SeenArrays
from .wire.tasks import Mode, TaskHead

__all__ = ["Dispatch"]

_PLAIN, _BROADCAST, _GANG = range(3)
_LAUNCH_LIMIT = 64 * 1024
"""Bytes: an order to fork is one packet."""


@dataclass(eq=False, kw_only=True)
class _FedCallTask(CallTask):
    """A call with iterators among its arguments."""

    feeds: tuple[InputFeed, ...] = ()

    def on_sent(self) -> None:
        super().on_sent()
        for feed in self.feeds:
            feed.start()

    def on_input_credit(self, lane: int) -> None:
        self.feeds[lane].grant()


@dataclass(eq=False, kw_only=True)
class _FedStreamTask(StreamTask):
    feeds: tuple[InputFeed, ...] = ()

    def on_sent(self) -> None:
        for feed in self.feeds:
            feed.start()

    def on_input_credit(self, lane: int) -> None:
        self.feeds[lane].grant()

    def on_result(self, received: Received) -> None:
        _stop(self.feeds)
        super().on_result(received)

    def on_failed(self, error: BaseException) -> None:
        _stop(self.feeds)
        super().on_failed(error)

    def on_error(self, failed: TaskFailure) -> None:
        _stop(self.feeds)
        own = next((feed.error for feed in self.feeds if feed.error is not None), None)
        super().on_error(failed) if own is None else self.on_failed(own)


class Dispatch:
    """Makes tasks for one pool. Thread-safe."""

    def __init__(self, engine: Engine, default_timeout_s: float | None) -> None:
        self._engine = engine
        self._store = BlobStore()
        self._functions = FunctionTable(self._store.put)
        self._default_timeout_s = default_timeout_s

    def close(self) -> None:
        self._store.clear()

    # Calls ----------------------------------------------------------------------------------------------------------

    def on_one_node(
        self,
        pending: PendingCompute[Any],
        *,
        nodes: tuple[int, ...] | None = None,
        is_strict: bool = False,
        leads: bool = False,
        seen: SeenArrays | None = None,
    ) -> Future[Any]:
        """A future of the call's value, or of an iterator if the function is a generator function.

        `nodes`: those that it may go to; None: any that is kept for no role.
        `leads`: the caller waits for it at once, and may do the reading; the future may be done when it is returned.
        """
        if pending.fn.launch.is_gang:
            return self._gang(pending, nodes=None, one_of=nodes)
        return self._call(pending, kind=_PLAIN, nodes=nodes, is_strict=is_strict, leads=leads, seen=seen)

    def on_each_node(self, pending: PendingCompute[Any], nodes: tuple[int, ...]) -> list[Future[Any]]:
        """One future for each of the nodes; or, for a gang, one future of the whole list."""
        if pending.fn.launch.is_gang:
            return [self._gang(pending, nodes=nodes)]
        parts = len(nodes)
        return [
            self._call(pending, kind=_BROADCAST, nodes=(node,), part=part, parts=parts)
            for part, node in enumerate(nodes)
        ]

    def _call(
        self,
        pending: PendingCompute[Any],
        *,
        kind: int,
        nodes: tuple[int, ...] | None,
        part: int = 0,
        parts: int = 1,
        is_strict: bool = False,
        leads: bool = False,
        seen: SeenArrays | None = None,
    ) -> Future[Any]:
        engine = self._engine
        task_id = engine.next_id()
        args, kwargs, sources = take_inputs(pending.fn, pending.args, pending.kwargs)
        options = pending.options
        refuse_gang_options(options, pending.name)
        if sources and (options.retries or options.retry_on):
            raise UsageError(f"retries: {pending.name!r} reads an iterator, which cannot be read twice; use retries=0")
        if pending.fn.is_generator and (options.retries or options.retry_on):
            raise UsageError(
                f"retries: {pending.name!r} is a generator function; what it has yielded cannot be taken back: "
                "use retries=0, and call it again from where it stopped"
            )
        # What may be sent twice cannot stay in memory: nobody waits any more when it is sent again.
        is_once = not (sources or options.retries or options.retry_on or pending.fn.is_generator)
        may_stay = engine.leading.may_pull if leads and is_once else None
        payload = self.arguments(args, kwargs, pending.name, seen, may_stay=may_stay)
        common: dict[str, Any] = {
            "id": task_id,
            "name": pending.name,
            "function": self.function(pending.fn, pending.name),
            "payload": payload,
            "options": options,
            "timeout_s": self._timeout_s(options),
            "may_move": not sources and not pending.fn.is_generator,
        }
        future: Future[Any] = Future(
            lambda: engine.cancel(task_id),
            is_strict=is_strict,
            lead=None if leads else lambda future: engine.leading.lead(task_id, future),
        )
        future.call_id = task_id
        # Not of a stream: it must be garbage when its reader drops it.
        told = None if pending.fn.is_generator else future
        feeds = tuple(
            InputFeed(engine, task_id, lane, source, self._store.put, told) for lane, source in enumerate(sources)
        )
        task: Task
        if pending.fn.is_generator:
            head = TaskHead(common["function"].digest, Mode.STREAM, kind, len(sources), WINDOW, part, parts)
            stream: ResultStream[Any] = ResultStream(
                lambda count: engine.streams.grant(task_id, count),
                lambda: _close(engine.streams.close, task_id, feeds),
                lambda: _close(engine.abandon, task_id, feeds),
                WINDOW,
            )
            task = _FedStreamTask(head=head, stream=weakref.ref(stream), feeds=feeds, **common)
            future.settle(stream)
        else:
            head = TaskHead(common["function"].digest, Mode.CALL, kind, len(sources), 0, part, parts)
            if feeds:
                future.add_done_callback(lambda _: _stop(feeds))
                task = _FedCallTask(head=head, future=future, feeds=feeds, **common)
            else:
                kind_of_task = PulledTask if payload.stays else CallTask
                task = kind_of_task(head=head, future=future, **common)
        if leads and not feeds:
            engine.leading.submit(task, future, nodes)
        else:
            engine.submit(task, nodes=nodes)
        return future

    def _gang(
        self, pending: PendingCompute[Any], *, nodes: tuple[int, ...] | None, one_of: tuple[int, ...] | None = None
    ) -> Future[Any]:
        engine, launch = self._engine, pending.fn.launch
        if pending.fn.is_generator:
            raise UsageError(
                f"{pending.name!r} is a generator function under an integration: ranks return values, they do not "
                "stream; return the result, or print progress"
            )
        gang_id = engine.next_id()
        function = self.function(pending.fn, pending.name)
        options = pending.options
        if options.timeout_s is None:
            options = CallOptions(**{**_fields(options), "timeout_s": self._default_timeout_s})
        gang = Gang(
            id=gang_id,
            name=pending.name,
            launch=launch,
            launch_bytes=_pickled_launch(launch),
            function=function,
            payload=self.arguments(pending.args, pending.kwargs, pending.name),
            head=TaskHead(function.digest, Mode.CALL, _GANG, 0, 0),
            options=options,
            nodes=nodes,
            one_of=one_of,
            ranks_per_node=engine.nodes.ranks_per_node(launch),
            future=Future(lambda: engine.cancel_gang(gang_id)),
            retries_left=options.retries,
            restarts_left=options.max_restarts,
        )
        gang.future.call_id = gang_id
        engine.submit_gang(gang)
        return gang.future

    def _timeout_s(self, options: CallOptions) -> float | None:
        return self._default_timeout_s if options.timeout_s is None else options.timeout_s

    # Pickling -------------------------------------------------------------------------------------------------------

    def function(self, function: Callable[..., Any], name: str) -> WireFunction:
        """Raises ArgumentNotPicklable."""
        try:
            return self._functions.get(function)
        except Exception as error:
            raise ArgumentNotPicklable(
                f"the function {name!r} cannot be sent: {type(error).__name__}: {error}; "
                "something it uses from outside (a global, a closure) cannot be pickled: make it inside the function",
                argument=name,
            ) from error

    def payload(self, value: Any) -> Encoded:
        return encode(value, self._store.put)

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
        put = self._store.put
        try:
            if seen is None:
                return encode((args, kwargs), put, may_stay=may_stay)
            return encode((args, kwargs), lambda data: seen.put(data, put), may_stay=may_stay, reduce=seen.reduce)
        except Exception as error:
            which, value = self._unpicklable(args, kwargs)
            advice = "send plain data, arrays or paths, and open files, locks and connections inside the function"
            if isinstance(value, StdFuture):
                advice = "send its value: .result()"
            raise ArgumentNotPicklable(
                f"{name}(): {which} cannot be sent: {type(error).__name__}: {error}; {advice}", argument=which
            ) from error

    def _unpicklable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, object]:
        named = [(f"argument {i + 1}", v) for i, v in enumerate(args)]
        named += [(f"argument {k!r}", v) for k, v in kwargs.items()]
        for which, value in named:
            try:
                encode(value, self._store.put)
            except Exception:
                return f"{which} (a {type(value).__qualname__})", value
        return "an argument", None


def _stop(feeds: tuple[InputFeed, ...]) -> None:
    for feed in feeds:
        feed.stop()


def _close(close_stream: Callable[[int], None], task: int, feeds: tuple[InputFeed, ...]) -> None:
    """The reader of a stream has gone."""
    _stop(feeds)
    close_stream(task)


def _fields(options: CallOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in CallOptions.__dataclass_fields__}


def _pickled_launch(launch: Launch) -> bytes:
    try:
        data = pickle.dumps(launch)
    except Exception as error:
        names = ", ".join(i.name for i in launch.integrations)
        raise ArgumentNotPicklable(
            f"the options of the integration ({names}) cannot be sent: {type(error).__name__}: {error}"
        ) from error
    if len(data) > _LAUNCH_LIMIT:
        names = ", ".join(i.name for i in launch.integrations)
        raise UsageError(
            f"the options of the integration ({names}) are {len(data)} bytes; the limit is {_LAUNCH_LIMIT}. "
            "Pass large things as arguments of the function"
        )
    return data
