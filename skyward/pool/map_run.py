"""`pool.map` and `pool.imap`: many calls of one function, in chunks of the right size (see `chunk_sizes`).

A slot may return the end of a chunk that takes too long; those calls go out in new chunks. When a slot dies, its chunk
is not lost as a whole: results that were sent are kept, and calls that had not begun run elsewhere.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal

from ..calls.futures import refuse_to_wait
from ..calls.graphs import has_calls
from ..calls.options import CallOptions
from ..calls.pending import ComputeFunction
from ..console.activity import Progress, ProgressBoard
from ..core import interrupts
from ..core.records import dataclass
from ..core.user_lines import drop_our_frames
from ..engine.engine import Engine
from ..engine.retries import Retries
from ..engine.tasks import Loss, Received, Task, TaskFailure, WireFunction, loss_error
from ..errors import ArgumentNotPicklable, NotRun, UsageError
from ..values.ref import splice_items
from ..wire.failures import decode_failure
from ..wire.numbers import pack_numbers, unpack_numbers
from ..wire.tasks import Mode, RaisedItem, TaskHead
from .chunk_sizes import MAX_ITEMS, ChunkSizes
from .map_graphs import MapGraphs, Prepare
from .packer import Packer

_BUFFERED = 4
"""Chunks per slot that a lazy map reads ahead of its consumer, including values that wait for an earlier one."""

_LOOK_AT = 64
"""Most items of a sequence that are looked at to find out whether it holds numbers."""

_RESOURCES = ("cpus", "gpus", "memory_gib", "accelerator")

Chunk = int | Literal["auto"]


def check_chunk(chunk: Chunk) -> None:
    is_number = isinstance(chunk, int) and not isinstance(chunk, bool)
    if not (chunk == "auto" or (is_number and chunk >= 1)):
        raise UsageError(
            f"chunk={chunk!r}: not supported; pass 'auto' or a number of calls >= 1", field="chunk", value=chunk
        )


@dataclass(eq=False, kw_only=True)
class _ChunkTask(Task):
    """Chunk in flight. It reports to the map's own thread through the queue."""

    handles_loss = True

    first: int
    items: Sequence[Any]
    events: queue.SimpleQueue[tuple[Any, ...]]
    delivered: int = 0
    is_paused: bool = False
    """Whether it was sent with a pause."""

    @property
    def size_bytes(self) -> int:
        return len(self.payload.body) + sum(blob.size for blob in self.payload.blobs)

    @property
    def calls(self) -> int:
        return len(self.items)

    def on_result(self, received: Received) -> None:
        self.events.put(("done", self, received))

    def on_part(self, received: Received) -> None:
        self.events.put(("part", self, received))

    def on_error(self, failed: TaskFailure) -> None:
        self.events.put(("failed", self, failed))

    def on_failed(self, error: BaseException) -> None:
        self.events.put(("error", self, error))

    def on_lost(self, loss: Loss) -> None:
        self.events.put(("lost", self, loss))


class MapRun:
    """One map. Iterate over `results()`; closing that generator cancels the open calls."""

    def __init__(  # noqa: PLR0913  # keyword-only
        self,
        *,
        engine: Engine,
        packing: Packer,
        function: ComputeFunction[..., Any],
        sent_function: WireFunction,
        name: str,
        prepare_graphs: Prepare,
        iterables: tuple[Iterable[Any], ...],
        slots: int,
        nodes: tuple[int, ...] | None,
        chunk: Chunk,
        ordered: bool,
        return_exceptions: bool,
        is_lazy: bool,
        board: ProgressBoard,
        max_inflight: int | None = None,
    ) -> None:
        self._engine = engine
        self._packing = packing
        self._function = sent_function
        self._name = name
        self._options = options = function.options
        self._chunk_options = _without_retries(options)
        self._star = len(iterables) != 1
        self._source: Iterator[Any] = zip(*iterables, strict=False) if self._star else iter(iterables[0])
        # Sequences are sliced instead of read one by one. A sliced range is three numbers on the wire.
        self._sequence: Any = iterables[0] if not self._star and type(iterables[0]) in (list, tuple, range) else None
        self._slots = slots
        self._nodes = nodes
        self._board = board
        length = _length(iterables)
        self._progress = Progress(name, length)
        self._sizes = ChunkSizes(
            slots=slots,
            chunk=None if chunk == "auto" else chunk,
            left=length,
            is_lazy=is_lazy,
            round_trip_ns=engine.nodes.round_trip_s * 1e9,
            may_guess=options.timeout_s is None and max_inflight is None,
            is_cheap=_are_numbers(self._sequence),
        )
        self._ordered = ordered
        self._return_exceptions = return_exceptions
        self._is_lazy = is_lazy
        self._max_inflight = max_inflight
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._open: dict[int, _ChunkTask] = {}
        self._graphs = MapGraphs(function, is_star=self._star, prepare=prepare_graphs, events=self._events)
        self._has_calls = False
        """Whether calls were found among the items."""
        self._given_back: list[tuple[int, Sequence[Any], int]] = []
        """Heap of returned calls: (index of the first call, items of its chunk, offset of the call in them)."""
        self._next_index = 0
        self._taken = 0
        self._is_exhausted = False
        self._input_error: Exception | None = None
        self._retries: dict[int, Retries] = {}
        """Retries left to each call that has failed or was lost."""
        self._paused = 0
        """Open chunks that were sent with a pause."""
        self._shown: Callable[[], None] | None = None
        """Wait briefly until the output of the calls is shown."""

    def results(self) -> Iterator[Any]:
        """Yield values in order, or as they arrive. Raises the first call's exception, and cancels the other calls."""
        try:
            with closing(self.lists()) as lists:
                for ready in lists:
                    yield from ready
        except Exception as error:
            drop_our_frames(error)
            raise

    def lists(self) -> Generator[list[Any], None, None]:
        """Yield the values of `results` as they arrive, several at a time."""
        refuse_to_wait("map")
        waiting: dict[int, list[Any]] = {}
        self._board.begin(self._progress)
        try:
            self._fill()
            while self._open or self._graphs:
                for start, values in self._handle(self._next_event()):
                    self._progress.add(len(values))
                    waiting[start if self._ordered else self._taken] = values
                    while self._taken in waiting:
                        ready = waiting.pop(self._taken)
                        self._taken += len(ready)
                        yield ready
                self._fill()
            if self._shown is not None:
                self._shown()
            if self._input_error is not None:
                raise self._input_error
        finally:
            self._progress.end()
            # This may be a finalizer.
            self._graphs.abandon()
            for task_id in list(self._open):
                self._engine.abandon(task_id)

    # Sending --------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Keep one chunk running on every slot and one behind it; read no more input than that."""
        while len(self._open) + len(self._graphs) - self._paused < self._sizes.limit:
            first, items = self._next_items()
            if not items:
                return
            self._send(first, items)

    def _next_items(self) -> tuple[int, Sequence[Any]]:
        """Return (index of the first item, items) of the next chunk; no items if nothing can be sent now."""
        if self._given_back:
            return self._next_given_back()
        room = self._room()
        if self._is_exhausted or room <= 0:
            return 0, ()
        count = min(self._sizes.size, room)
        items = self._read(count)
        self._is_exhausted = len(items) < count
        first, self._next_index = self._next_index, self._next_index + len(items)
        return first, items

    def _next_given_back(self) -> tuple[int, Sequence[Any]]:
        count = min(self._sizes.size, self._inflight_room())
        if count <= 0:
            return 0, ()
        first, items, at = heapq.heappop(self._given_back)
        if len(items) - at > count:
            heapq.heappush(self._given_back, (first + count, items, at + count))
        return first, items[at : at + count]

    def _read(self, count: int) -> Sequence[Any]:
        """Read items of the input; fewer than `count` at its end. A lazy map raises its error after earlier values."""
        if self._sequence is not None:
            part: Sequence[Any] = self._sequence[self._next_index : self._next_index + count]
            return part
        items: list[Any] = []
        try:
            items.extend(islice(self._source, count))  # keeps the items before an error
        except Exception as error:  # the user's iterator may raise anything
            if not self._is_lazy:
                raise
            self._input_error = error
        return items

    def _room(self) -> int:
        """Return how many more calls may be read: to be sent, or to wait here for the value of an earlier one."""
        room = self._inflight_room()
        if self._is_lazy:
            room = min(room, self._slots * _BUFFERED * self._sizes.size - (self._next_index - self._taken))
        return room

    def _inflight_room(self) -> int:
        if self._max_inflight is None:
            return MAX_ITEMS
        sent = sum(len(task.items) - task.delivered for task in self._open.values())
        return self._max_inflight - sent - len(self._graphs)

    def _send(self, first: int, items: Sequence[Any], after_s: float = 0.0) -> None:
        expected_ns = self._sizes.expected_ns
        try:
            packed = pack_numbers(items) or splice_items(items, is_star=self._star)
            payload = self._packing.payload((packed, self._star, self._return_exceptions, self._sizes.limit_ns))
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            # Found out by failing, because a look into all items costs more than sending small ones.
            if isinstance(error, NotRun) and any(map(has_calls, items)):
                self._run_calls_of(first, items)
                return
            raise ArgumentNotPicklable(
                f"map(): an item between {first} and {first + len(items) - 1} cannot be sent: "
                f"{type(error).__name__}: {error}; send plain data, arrays or paths",
                argument=f"item {first}..{first + len(items) - 1}",
            ) from error
        task = _ChunkTask(
            id=self._engine.builder.next_id(),
            name=self._name,
            head=TaskHead(self._function.digest, Mode.CHUNK, 0, 0, first & 0xFFFFFFFF),
            function=self._function,
            payload=payload,
            options=self._chunk_options,
            timeout_s=None if self._options.timeout_s is None else self._options.timeout_s * len(items),
            expected_ns=expected_ns,
            first=first,
            items=items,
            events=self._events,
            is_paused=after_s > 0,
        )
        self._open[task.id] = task
        self._paused += task.is_paused
        self._sizes.sent(len(items), task.size_bytes)
        self._engine.submit(task, nodes=self._nodes, after_s=after_s)

    def _run_calls_of(self, first: int, items: Sequence[Any]) -> None:
        """Run the calls in the first item. It is sent when their values are there, and the other items one by one."""
        if not self._has_calls:
            self._has_calls = True
            self._sizes.send_one_by_one()
            if not self._is_lazy:  # all items at once, because a call that two of them share runs once
                self._graphs.add(chain(enumerate(items, first), enumerate(self._read_all(), self._next_index)))
        if len(items) > 1:
            heapq.heappush(self._given_back, (first + 1, items, 1))
        if not has_calls(items[0]):
            self._send(first, items[:1])
            return
        if self._is_lazy:
            self._graphs.add([(first, items[0])])
        self._graphs.begin(first)

    def _read_all(self) -> Sequence[Any]:
        """Return the items that no chunk has had yet."""
        if self._sequence is not None:
            rest: Sequence[Any] = self._sequence[self._next_index :]
            return rest
        rest = list(self._source)
        self._source = iter(rest)
        return rest

    # Receiving ------------------------------------------------------------------------------------------------------

    def _next_event(self) -> tuple[Any, ...]:
        events: list[tuple[Any, ...]] = []

        def wait(timeout_s: float | None) -> bool:
            with contextlib.suppress(queue.Empty):  # `wait_for` calls again
                events.append(self._events.get(timeout=timeout_s))
            return bool(events)

        interrupts.wait_for(wait)
        return events[0]

    def _handle(self, event: tuple[Any, ...]) -> list[tuple[int, list[Any]]]:
        """Process an event. Returns pairs of (first index, values)."""
        kind, task, content = event
        if kind == "resolved":
            return self._after_graph(content)
        if task.id not in self._open:
            return []
        self._shown = task.shown or self._shown
        # Output comes before the values that follow it. A map that returns a list waits only for its last lines.
        if self._shown is not None and (self._is_lazy or kind not in ("part", "done")):
            self._shown()
        if kind == "part" or kind == "done":
            values = unpack_numbers(content.decode()[1])
            start = task.first + task.delivered
            task.delivered += len(values)
            if kind == "done":
                self._after_end(task, content.elapsed_ns)
            return [(start, self._decoded(values))] if values else []
        self._close(task)
        if kind == "lost":
            return self._after_loss(task, content)
        if kind == "failed":
            return self._after_failure(task, content)
        raise content

    def _after_graph(self, index: int) -> list[tuple[int, list[Any]]]:
        """Send an item whose calls have run."""
        try:
            item = self._graphs.take(index)
        except Exception as error:
            if not self._return_exceptions:
                raise
            return [(index, [error])]
        self._send(index, [item])
        return []

    def _after_end(self, task: _ChunkTask, elapsed_ns: int) -> None:
        """Queue calls again that had not begun when the chunk's time was up."""
        self._close(task)
        self._sizes.ended(elapsed_ns, task.delivered, task.size_bytes, self._engine.nodes.round_trip_s * 1e9)
        if task.delivered < len(task.items):
            self._give_back(task, task.first + task.delivered)

    def _close(self, task: _ChunkTask) -> None:
        del self._open[task.id]
        self._paused -= task.is_paused

    def _retry(self, task: _ChunkTask, calls: range, pause_s: float) -> None:
        """Run calls of a chunk again after their pause, and those behind them at once."""
        if pause_s:
            self._send(calls.start, task.items[calls.start - task.first : calls.stop - task.first], pause_s)
            self._give_back(task, calls.stop)
        else:
            self._give_back(task, calls.start)

    def _give_back(self, task: _ChunkTask, first: int) -> None:
        at = first - task.first
        if at == len(task.items):
            return
        heapq.heappush(self._given_back, (first, task.items, at))
        self._sizes.returned(len(task.items) - at)

    def _decoded(self, values: list[Any]) -> list[Any]:
        if not self._return_exceptions:
            return values
        return [self._exception(v) if type(v) is RaisedItem else v for v in values]

    def _exception(self, raised: RaisedItem) -> BaseException:
        import pickle

        failure = pickle.loads(raised.failure)
        return decode_failure(failure, where=f"map of {self._name!r}", node=None, task=self._name)

    def _after_failure(self, task: _ChunkTask, failed: TaskFailure) -> list[tuple[int, list[Any]]]:
        error = failed.error()
        index = failed.failure.index
        if index is not None and isinstance(error, self._options.retry_on):
            pause_s = self._spend_retry(index, is_node_loss=False)
            if pause_s is not None:
                self._retry(task, range(task.first + task.delivered, index + 1), pause_s)
                return []
        raise error

    def _after_loss(self, task: _ChunkTask, loss: Loss) -> list[tuple[int, list[Any]]]:
        """Keep delivered values, run calls again that had not begun, and count the others against their retries."""
        first = task.first + task.delivered
        if loss.is_node:
            begun = len(task.items) if loss.started is not False else 0
        else:
            begun = loss.index + 1 if loss.started and loss.index is not None else 0
        lost = range(first, min(task.first + begun, task.first + len(task.items)))
        pauses = [self._spend_retry(index, is_node_loss=loss.is_node) for index in lost]
        if None not in pauses:
            self._retry(task, lost, max((pause_s for pause_s in pauses if pause_s is not None), default=0.0))
            return []
        error = loss_error(loss, self._name, task.tail)
        if not self._return_exceptions:
            raise error
        if lost.stop < task.first + len(task.items):
            self._give_back(task, lost.stop)
        return [(first, [error] * len(lost))]

    def _spend_retry(self, index: int, *, is_node_loss: bool) -> float | None:
        """Use up a retry of one call. Return the seconds to wait before it; None: no retry is left."""
        return self._retries.setdefault(index, Retries(self._options)).spend(is_node_loss=is_node_loss)


def _without_retries(options: CallOptions) -> CallOptions:
    """Return options without retries: a map counts them per call, not per chunk."""
    return replace(CallOptions(name=options.name), **{field: getattr(options, field) for field in _RESOURCES})


def _are_numbers(sequence: Any) -> bool:
    """Guess from some of its items whether a sequence holds only numbers. None: it is none."""
    if sequence is None or type(sequence) is range:
        return sequence is not None
    return pack_numbers(sequence[:: len(sequence) // _LOOK_AT + 1]) is not None


def _length(iterables: tuple[Iterable[Any], ...]) -> int | None:
    try:
        return min(len(i) for i in iterables)  # type: ignore[arg-type]
    except TypeError:  # an iterator has no length
        return None
