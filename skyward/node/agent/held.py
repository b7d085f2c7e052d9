"""Frames of tasks that the client of this node has not written down, for the next one.

The head of a detached pool writes what comes of a call to its journal. When it is killed, the next one has only that.
So the agent holds the frames that bring values and ends of tasks until the head says, for each task, how many of them
are written (SETTLED). A channel's own count cannot tell: it dies with the process that received.

These rules hold from one head to the next:

- The numbered frames of a task have one order: parts, items, and the frame that ends it. Blobs belong to the next one.
- The agent forgets a numbered frame only after SETTLED, so each one is in the journal, or here, or in both.
- It tells the next head the number of the first one that it holds of each task, before it sends them again. So the
  head can leave out those that it has: nothing comes twice.
- It tells all tasks that run, too. A task of the journal that is neither here nor ended never began: it runs once.
- Frames of ranks are settled when their gang is over: only then its head had written down what came of it.
- It counts the items that a generator may send. The head knows how many were read, and tells the difference.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from ...core.records import dataclass
from ...wire.frames import KEPT, SETTLED_KINDS, Frame, FrameKind
from ...wire.tasks import references

_FINAL = frozenset((FrameKind.RESULT, FrameKind.ERROR, FrameKind.LOST))


@dataclass(slots=True)
class _HeldTask:
    first: int = 0
    """Number of the first numbered frame that is held."""
    frames: list[Frame] = field(default_factory=list)
    credit: int = 0
    """Items that it was allowed to send beyond the first ones."""
    has_ended: bool = False
    note: tuple[Any, ...] = ()
    """Facts about the gang of a rank for the next head; see `RankOrder`."""


class HeldFrames:
    """Frames of the tasks of one node. Only the agent's thread uses it."""

    def __init__(self) -> None:
        self._tasks: dict[int, _HeldTask] = {}

    def add(self, frame: Frame, note: tuple[Any, ...] = ()) -> None:
        """Hold a frame of a task. Its descriptor stays the caller's. Raises OSError: there is none left for it."""
        held = self._tasks.setdefault(frame.ident, _HeldTask())
        held.note = held.note or note
        held.frames.append(frame if frame.fd < 0 else frame._replace(fd=os.dup(frame.fd)))
        held.has_ended |= frame.kind in _FINAL

    def settle(self, task: int, count: int) -> None:
        """Forget the first numbered frames of a task, with their blobs."""
        held = self._tasks.get(task)
        if held is None:
            return
        held.first += count
        while count and held.frames:
            frame = held.frames.pop(0)
            count -= frame.kind in SETTLED_KINDS
            _close(frame)
        if held.has_ended and not held.frames:
            del self._tasks[task]

    def grant(self, task: int, count: int) -> None:
        """Count items that a generator may send."""
        self._tasks.setdefault(task, _HeldTask()).credit += count

    def progress(self, task: int) -> tuple[int, int]:
        """Return the number of the first frame that is held of a task, and the items that it was granted."""
        held = self._tasks.get(task, _HeldTask())
        return held.first, held.credit

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._tasks))

    @property
    def ranks(self) -> dict[int, tuple[Any, ...]]:
        """Notes of the ranks whose frames are held, by task."""
        return {task: held.note for task, held in self._tasks.items() if held.note}

    @property
    def kept(self) -> Counter[bytes]:
        """Digests of blobs on this node that held values refer to, with their number."""
        frames = (frame for held in self._tasks.values() for frame in held.frames if frame.flags & KEPT)
        return Counter(digest for frame in frames for digest, _ in references(frame.body))

    def send_again(self, send: Callable[[Frame], object]) -> None:
        """Send all frames that are held."""
        for held in self._tasks.values():
            for frame in held.frames:
                send(frame)

    def forget(self, task: int) -> None:
        """Forget a task, because nobody knows it any longer."""
        held = self._tasks.pop(task, None)
        for frame in () if held is None else held.frames:
            _close(frame)

    def clear(self) -> None:
        for task in self:
            self.forget(task)


def _close(frame: Frame) -> None:
    if frame.fd >= 0:
        os.close(frame.fd)
