"""Snapshots of a pool's calls for its console: what each node runs, and how far maps and groups are.

The engine and the pool keep this state anyway. A console that wants it asks a few times a second, so a call pays
nothing for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from ..core.records import dataclass

_LINGER_S = 1.0
"""Seconds that a node shows a call that has ended. Without them a node with short calls would flicker."""
_MOST = 16
"""Maps and groups that are kept; of more, the oldest are not shown."""


@dataclass(frozen=True, kw_only=True)
class RunningTask:
    """A task that a node works on. `calls`: calls in it; more than one in a chunk of a map.

    `progress`: the progress line that it shows now, such as a tqdm bar; empty if it shows none.
    """

    task: int
    node: int
    name: str
    rank: int | None = None
    calls: int = 1
    progress: str = ""


class Progress:
    """Progress of one map, group or transfer of files. Thread-safe.

    Args:
        total: number of calls; None if the input has no length, or is not known yet.
        unit: what it counts: calls, or bytes of files.
    """

    __slots__ = ("_lock", "began", "done", "ended", "name", "on_end", "total", "unit")

    def __init__(self, name: str, total: int | None, unit: Literal["calls", "bytes"] = "calls") -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.began = time.time()
        self.ended: float | None = None
        self.done = 0
        self.on_end: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count calls that are done; the last one ends it."""
        with self._lock:
            self.done += count
        if self.done == self.total:
            self.end()

    def end(self) -> None:
        """Stop the clock. Idempotent."""
        if self.ended is None:
            self.ended = time.time()
            if self.on_end is not None:
                self.on_end()

    def seconds(self, now: float) -> float:
        return (now if self.ended is None else self.ended) - self.began

    def rate(self, now: float) -> float:
        """Return calls per second since the start."""
        seconds = self.seconds(now)
        return self.done / seconds if seconds > 0 else 0.0

    def left_s(self, now: float) -> float | None:
        """Estimate the seconds that are left; None if nothing is known yet, or if it has ended."""
        rate = self.rate(now)
        if self.total is None or self.ended is not None or not rate:
            return None
        return max(0.0, (self.total - self.done) / rate)


class ProgressBoard:
    """Maps and groups of one pool. Thread-safe."""

    def __init__(self) -> None:
        self._entries: list[Progress] = []
        self.on_end: Callable[[], None] | None = None
        """Called at the end of each map and group, by the thread that ends it."""
        self._lock = threading.Lock()

    def begin(self, progress: Progress) -> Progress:
        progress.on_end = self.on_end
        with self._lock:
            # Of those that ended, only the last one is of interest. A loop of short maps must not pile them up.
            self._entries = [p for p in self._entries if p.ended is None][-_MOST:]
            self._entries.append(progress)
        return progress

    def entries(self) -> tuple[Progress, ...]:
        """Return what is open, in the order of the starts; where nothing is, what ended last."""
        with self._lock:
            is_open = tuple(p for p in self._entries if p.ended is None)
            return is_open or tuple(self._entries[-1:])


@dataclass(frozen=True, kw_only=True)
class ActorWork:
    """State of one actor. `calls`: calls that were sent to it and have not ended."""

    name: str
    node: int | None
    state: Literal["waiting", "starting", "alive", "closing"]
    calls: int = 0

    def __str__(self) -> str:
        where = "" if self.node is None else f" on node {self.node}"
        state = "" if self.state == "alive" else f" ({self.state})"
        calls = f", {self.calls:,} call{'s' if self.calls != 1 else ''}" if self.calls else ""
        return f"{self.name}{where}{state}{calls}"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Calls of a pool: `busy` of all slots have one, `queued` wait, `ended` and `failed` so far."""

    slots: int
    busy: int
    queued: int
    ended: int
    failed: int
    why: str = ""
    """What the oldest waiting call lacks, if it is more than a slot."""
    running: tuple[RunningTask, ...] = ()
    actors: tuple[ActorWork, ...] = ()
    progress: tuple[Progress, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeWork:
    """Work of one node: the names of its calls, how many of each, and since when the oldest of them was seen."""

    calls: tuple[tuple[str, int], ...]
    since: float
    progress: str = ""


class WorkTracker:
    """Remember when each task was first seen, so that the engine need not keep times. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._last: dict[int, tuple[float, NodeWork]] = {}
        """By node: when it was seen busy for the last time, and with what."""

    def update(self, running: tuple[RunningTask, ...], now: float) -> dict[int, NodeWork]:
        """Return the work of each node that is busy, or was a moment ago."""
        self._seen = {task.task: self._seen.get(task.task, now) for task in running}
        by_node: dict[int, list[RunningTask]] = {}
        for task in running:
            by_node.setdefault(task.node, []).append(task)
        for node, tasks in by_node.items():
            self._last[node] = now, _work(tasks, self._seen)
        self._last = {node: last for node, last in self._last.items() if now - last[0] < _LINGER_S}
        return {node: work for node, (_, work) in self._last.items()}


def _work(tasks: list[RunningTask], seen: dict[int, float]) -> NodeWork:
    counts: dict[str, int] = {}
    for task in tasks:
        counts[task.name] = counts.get(task.name, 0) + 1
    oldest = min(tasks, key=lambda task: seen[task.task])
    progress = next((task.progress for task in tasks if task.progress), "")
    return NodeWork(calls=tuple(counts.items()), since=seen[oldest.task], progress=progress)
