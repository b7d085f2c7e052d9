"""Client side of streams: iterators among the arguments, the threads that feed them, and the tasks they feed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

from ..calls.futures import Future
from ..calls.pending import ComputeFunction
from ..calls.undecoded import Undecoded
from ..core.records import dataclass
from ..engine.engine import Engine
from ..engine.tasks import CallTask, Received, StreamTask, TaskFailure
from ..errors import UsageError
from ..wire.frames import FrameKind
from ..wire.payloads import PutBlob, encode
from ..wire.tasks import InputStream

WINDOW = 16
"""Most items of a stream in flight, in either direction."""


def take_inputs(
    function: ComputeFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Iterator[Any]]]:
    """Replace iterators by streams where the parameter is annotated `Iterator[T]`."""
    bound = inspect.signature(function.fn).bind(*args, **kwargs)
    sources: list[Iterator[Any]] = []
    for name in function.iterator_parameters:
        value = bound.arguments.get(name)
        if value is not None and hasattr(value, "__iter__"):
            bound.arguments[name] = InputStream(len(sources))
            sources.append(iter(value))
    return bound.args, bound.kwargs, sources


class InputFeed:
    """Feeds one iterator to a running task, at most one window ahead.

    A separate thread advances the iterator, because it may block or be slow. If it raises, the call fails with that
    exception.
    """

    def __init__(
        self,
        engine: Engine,
        task: int,
        lane: int,
        source: Iterator[Any],
        put: PutBlob,
        future: Future[Any] | None,
    ) -> None:
        self._engine = engine
        self._task = task
        self._lane = lane
        self._source = source
        self._put = put
        self._future = future
        self._credit = threading.Semaphore(WINDOW)
        self._is_stopped = False
        self._is_started = False
        self.error: BaseException | None = None
        """Exception of the iterator."""

    def start(self) -> None:
        """Begin to send. Idempotent: another head sends a call again that had not begun."""
        if self._is_started:
            return
        self._is_started = True
        try:
            threading.Thread(target=self._run, name=f"skyward-feed-{self._task}", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            self._fail(error)

    def grant(self) -> None:
        self._credit.release()

    def stop(self) -> None:
        self._is_stopped = True
        self._credit.release()

    def _run(self) -> None:
        try:
            for item in self._source:
                self._credit.acquire()
                if self._is_stopped:
                    return
                encoded = encode(item, self._put)
                if any(blob.here() is None for blob in encoded.blobs):  # nothing would wait for bytes of other nodes
                    raise UsageError("iterator argument: it yields a kept sky.Ref; yield its value, ref.get()")
                self._engine.streams.send_item(self._task, self._lane, encoded)
        except BaseException as error:  # from the user's iterator, or from pickling or sending an item
            self._fail(error)
            return
        self._engine.streams.end_input(self._task, FrameKind.IN_END, self._lane)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        if self._future is not None:
            self._future.settle_error(error)
        self._engine.streams.end_input(self._task, FrameKind.IN_ERROR, self._lane)


@dataclass(eq=False, kw_only=True)
class FedCallTask(CallTask):
    """Call with iterators among its arguments."""

    feeds: tuple[InputFeed, ...] = ()

    def on_sent(self) -> None:
        super().on_sent()
        for feed in self.feeds:
            feed.start()

    def on_input_credit(self, lane: int) -> None:
        self.feeds[lane].grant()


@dataclass(eq=False, kw_only=True)
class FedStreamTask(StreamTask):
    """Call of a generator function, perhaps with iterators among its arguments."""

    feeds: tuple[InputFeed, ...] = ()

    def on_sent(self) -> None:
        for feed in self.feeds:
            feed.start()

    def on_input_credit(self, lane: int) -> None:
        self.feeds[lane].grant()

    def on_result(self, received: Received) -> None:
        stop_feeds(self.feeds)
        super().on_result(received)

    def on_failed(self, error: BaseException | Undecoded) -> None:
        stop_feeds(self.feeds)
        super().on_failed(error)

    def on_error(self, failed: TaskFailure) -> None:
        stop_feeds(self.feeds)
        own = next((feed.error for feed in self.feeds if feed.error is not None), None)
        super().on_error(failed) if own is None else self.on_failed(own)


def stop_feeds(feeds: tuple[InputFeed, ...]) -> None:
    """Stop feeds whose items nobody reads. Idempotent."""
    for feed in feeds:
        feed.stop()
