"""`pool.map` and `pool.imap`: many calls of one function, in chunks of the right size (see `chunk_sizes`).

A slot may give back the end of a chunk that takes longer than it should; it is cut anew. A chunk on a slot that dies is
not lost as a whole: results that were sent stay, calls that had not begun are run elsewhere.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from ..calls.futures import refuse_to_wait
from ..calls.options import CallOptions
from ..core import interrupts
from ..core.user_lines import drop_our_frames
from ..engine.engine import Engine
from ..engine.tasks import Loss, Received, Task, TaskFailure, WireFunction, loss_error
from ..errors import ArgumentNotPicklable, UsageError
from ..node.slot.execute import RaisedItem
from ..wire.failures import decode_failure
from ..wire.tasks import Mode, TaskHead
from .chunk_sizes import MAX_ITEMS, ChunkSizes
from .packer import Packer

__all__ = ["Chunk", "MapRun", "check_chunk"]

_BUFFERED = 4
"""Chunks for each slot that a lazy map reads ahead of its consumer: those on their way, and values that wait for an
earlier one."""

Chunk = int | Literal["auto"]


def check_chunk(chunk: Chunk) -> None:
    is_number = isinstance(chunk, int) and not isinstance(chunk, bool)
    if not (chunk == "auto" or (is_number and chunk >= 1)):
        raise UsageError(f"chunk: {chunk!r}; it is 'auto' or a number of calls >= 1")


@dataclass(eq=False, kw_only=True)
class _ChunkTask(Task):
    """A chunk on its way. It tells the map's own thread, through the queue."""

    handles_loss = True

    first: int
    items: Sequence[Any]
    events: queue.SimpleQueue[tuple[Any, ...]]
    delivered: int = 0

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
    """One map. Iterate over `results()`; closing that generator cancels what is on its way."""

    def __init__(  # noqa: PLR0913  # keyword-only
        self,
        *,
        engine: Engine,
        packing: Packer,
        function: WireFunction,
        name: str,
        options: CallOptions,
        iterables: tuple[Iterable[Any], ...],
        slots: int,
        nodes: tuple[int, ...] | None,
        chunk: Chunk,
        ordered: bool,
        return_exceptions: bool,
        is_lazy: bool,
        max_inflight: int | None = None,
    ) -> None:
        self._engine = engine
        self._packing = packing
        self._function = function
        self._name = name
        self._options = options
        self._star = len(iterables) != 1
        self._source: Iterator[Any] = zip(*iterables, strict=False) if self._star else iter(iterables[0])
        # Sliced, not read one by one; and a slice of a range is three numbers on the wire.
        self._sequence: Any = iterables[0] if not self._star and type(iterables[0]) in (list, tuple, range) else None
        self._slots = slots
        self._nodes = nodes
        self._sizes = ChunkSizes(
            slots=slots,
            chunk=None if chunk == "auto" else chunk,
            left=_length(iterables),
            is_lazy=is_lazy,
            round_trip_ns=engine.nodes.round_trip_s * 1e9,
            may_guess=options.timeout_s is None and max_inflight is None,
        )
        self._ordered = ordered
        self._return_exceptions = return_exceptions
        self._is_lazy = is_lazy
        self._max_inflight = max_inflight
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._open: dict[int, _ChunkTask] = {}
        self._given_back: list[tuple[int, Sequence[Any], int]] = []
        """Heap of (index of the first call, items of a chunk, offset of that call in them)."""
        self._next_index = 0
        self._taken = 0
        self._is_exhausted = False
        self._input_error: Exception | None = None
        self._retries: dict[int, int] = {}
        self._shown: Callable[[], None] | None = None
        """Waits a moment until what the calls printed is shown."""

    def results(self) -> Iterator[Any]:
        """Values in order (or as they come). Raises what the first failing call raised; the others are cancelled."""
        try:
            with closing(self.lists()) as lists:
                for ready in lists:
                    yield from ready
        except Exception as error:
            drop_our_frames(error)
            raise

    def lists(self) -> Generator[list[Any], None, None]:
        """`results`, as they arrive: some at a time."""
        refuse_to_wait("map")
        waiting: dict[int, list[Any]] = {}
        try:
            self._fill()
            while self._open:
                for start, values in self._handle(self._next_event()):
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
            for task_id in list(self._open):
                self._engine.abandon(task_id)  # this may be a finalizer

    # Sending --------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Keep every slot busy with one chunk and one behind it; read no more of the input than that."""
        while len(self._open) < self._sizes.limit:
            first, items = self._next_items()
            if not items:
                return
            self._send(first, items)

    def _next_items(self) -> tuple[int, Sequence[Any]]:
        """(index of the first, items) of the next chunk; no items: nothing can be sent now."""
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
        """Items of the input, fewer than `count` at its end. A lazy map raises its error behind what came before it."""
        if self._sequence is not None:
            part: Sequence[Any] = self._sequence[self._next_index : self._next_index + count]
            return part
        items: list[Any] = []
        try:
            items.extend(islice(self._source, count))  # what came before an error stays in the list
        except Exception as error:  # the user's iterator: any exception can come
            if not self._is_lazy:
                raise
            self._input_error = error
        return items

    def _room(self) -> int:
        """How many more calls may be read: to be on their way, or to wait here for the value of an earlier one."""
        room = self._inflight_room()
        if self._is_lazy:
            room = min(room, self._slots * _BUFFERED * self._sizes.size - (self._next_index - self._taken))
        return room

    def _inflight_room(self) -> int:
        if self._max_inflight is None:
            return MAX_ITEMS
        return self._max_inflight - sum(len(task.items) - task.delivered for task in self._open.values())

    def _send(self, first: int, items: Sequence[Any]) -> None:
        expected_ns = self._sizes.expected_ns
        try:
            payload = self._packing.payload((items, self._star, self._return_exceptions, self._sizes.limit_ns))
        except Exception as error:
            raise ArgumentNotPicklable(
                f"map: an item between {first} and {first + len(items) - 1} cannot be sent: "
                f"{type(error).__name__}: {error}",
                argument=f"item {first}..{first + len(items) - 1}",
            ) from error
        task = _ChunkTask(
            id=self._engine.builder.next_id(),
            name=self._name,
            head=TaskHead(self._function.digest, Mode.CHUNK, 0, 0, first & 0xFFFFFFFF),
            function=self._function,
            payload=payload,
            options=_without_retries(self._options),
            timeout_s=None if self._options.timeout_s is None else self._options.timeout_s * len(items),
            expected_ns=expected_ns,
            first=first,
            items=items,
            events=self._events,
        )
        self._open[task.id] = task
        self._sizes.sent(len(items), task.size_bytes)
        self._engine.submit(task, nodes=self._nodes)

    # Receiving ------------------------------------------------------------------------------------------------------

    def _next_event(self) -> tuple[Any, ...]:
        came: list[tuple[Any, ...]] = []

        def wait(timeout_s: float | None) -> bool:
            with contextlib.suppress(queue.Empty):  # `wait_for` asks again
                came.append(self._events.get(timeout=timeout_s))
            return bool(came)

        interrupts.wait_for(wait)
        return came[0]

    def _handle(self, event: tuple[Any, ...]) -> list[tuple[int, list[Any]]]:
        """(first index, values) of what came."""
        what, task, said = event
        if task.id not in self._open:
            return []
        self._shown = task.shown or self._shown
        # Lines come before the values that follow them. A map that returns a list waits for its last lines only.
        if self._shown is not None and (self._is_lazy or what not in ("part", "done")):
            self._shown()
        if what == "part" or what == "done":
            _, values = said.decode()
            start = task.first + task.delivered
            task.delivered += len(values)
            if what == "done":
                self._after_end(task, said.elapsed_ns)
            return [(start, self._decoded(values))] if values else []
        del self._open[task.id]
        if what == "lost":
            return self._after_loss(task, said)
        if what == "failed":
            return self._after_failure(task, said)
        raise said

    def _after_end(self, task: _ChunkTask, elapsed_ns: int) -> None:
        """Calls that were not begun when the chunk's time was up come again, in chunks of their own."""
        del self._open[task.id]
        self._sizes.ended(elapsed_ns, task.delivered, task.size_bytes, self._engine.nodes.round_trip_s * 1e9)
        if task.delivered < len(task.items):
            self._give_back(task, task.first + task.delivered)

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
        if index is not None and isinstance(error, self._options.retry_on) and self._may_retry(index):
            self._give_back(task, task.first + task.delivered)
            return []
        raise error

    def _after_loss(self, task: _ChunkTask, loss: Loss) -> list[tuple[int, list[Any]]]:
        """What was delivered stays; what had not begun runs again; what had begun is lost, unless it may run again."""
        first = task.first + task.delivered
        if loss.is_node:
            begun = len(task.items) if loss.started is not False else 0
        else:
            begun = loss.index + 1 if loss.started and loss.index is not None else 0
        lost = range(first, min(task.first + begun, task.first + len(task.items)))
        if not lost or all([self._may_retry(index) for index in lost]):  # noqa: C419  # each is counted
            self._give_back(task, first)
            return []
        error = loss_error(loss, self._name, task.tail)
        if not self._return_exceptions:
            raise error
        if lost.stop < task.first + len(task.items):
            self._give_back(task, lost.stop)
        return [(first, [error] * len(lost))]

    def _may_retry(self, index: int) -> bool:
        used = self._retries.get(index, 0)
        self._retries[index] = used + 1
        return used < self._options.retries


def _without_retries(options: CallOptions) -> CallOptions:
    """A map counts retries for each call, not for each chunk."""
    return CallOptions(name=options.name)


def _length(iterables: tuple[Iterable[Any], ...]) -> int | None:
    try:
        return min(len(i) for i in iterables)  # type: ignore[arg-type]
    except TypeError:  # an iterator has no length
        return None
