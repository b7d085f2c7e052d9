"""What training, snapshots, transfers and workers did when: to see that nothing waits. Standard library only."""

from __future__ import annotations

import json
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

__all__ = ["QUEUE", "SNAPSHOT", "TRAINING", "TRANSFER", "WAIT", "Span", "Timeline", "TimelineSummary"]

TRAINING, SNAPSHOT, TRANSFER, QUEUE = "training", "snapshot", "transfer", "queue"
"""Training, what it stands still for, and what evaluations go through on their way. Every other track is a worker, by
its name."""
OURS = (TRAINING, SNAPSHOT, TRANSFER, QUEUE)
WAIT = "wait"
"""The name of a span in the training track in which training waits for an evaluation."""
MOST_TRACKS = 128
OTHERS = "other workers"
LONGEST_TEXT = 300
"""Characters of a text in a span's args."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took from `start_s` to `end_s`, seconds since 1970. Plain values in `args`."""

    track: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class TimelineSummary:
    """Seconds, of the spans that are kept."""

    wall_s: float = 0.0
    """From the first begin to the last end."""
    snapshot_s: float = 0.0
    """In which training stood still for a copy of its weights."""
    waited_s: float = 0.0
    """In which training waited for evaluations."""
    evaluation_s: float = 0.0
    """Of all workers together."""
    hidden_s: float = 0.0
    """Of `evaluation_s`, what training spent training."""
    snapshots: int = 0
    evaluations: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    """By worker: in which it had at least one evaluation."""

    @property
    def stood_still_s(self) -> float:
        """In which training did not train: copies and waits."""
        return self.snapshot_s + self.waited_s


class Timeline:
    """Collects spans. Thread-safe; an `add` takes microseconds and never waits for a reader.

    Bounded: of each track the latest `spans_per_track` are kept, and beyond 128 tracks spans go to "other workers".
    Spans of one track may overlap, as those of a worker with several slots do.

    Example:
        >>> timeline = Timeline()
        >>> timeline.add("training", "steps 0 to 100", 0.0, 4.0)
        >>> timeline.add("snapshot", "step 50", 2.0, 2.1, step=50)
        >>> timeline.add("node 1", "step 50", 2.1, 3.6, step=50)
        >>> round(timeline.summary().hidden_s, 3)
        1.5
    """

    def __init__(self, *, spans_per_track: int = 4096, clock: Callable[[], float] = time.time) -> None:
        self._keep, self._clock = max(1, spans_per_track), clock
        self._tracks: dict[str, deque[Span]] = {}
        self._lock = threading.Lock()
        self._dropped = 0

    def add(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """One span that has ended. Ends before its begin (a clock that was set back) become its begin."""
        plain = {key: _plain(value) for key, value in args.items()}
        span = Span(track=track, name=name, start_s=start_s, end_s=max(start_s, end_s), args=plain)
        with self._lock:
            if track not in self._tracks and len(self._tracks) >= MOST_TRACKS:
                track = OTHERS
            kept = self._tracks.setdefault(track, deque(maxlen=self._keep))
            self._dropped += len(kept) == self._keep
            kept.append(span)

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Adds what its block took, also where the block raises; then `error` is in its args."""
        start_s = self._clock()
        try:
            yield
        except BaseException as error:
            self.add(track, name, start_s, self._clock(), **args, error=f"{type(error).__name__}: {error}")
            raise
        self.add(track, name, start_s, self._clock(), **args)

    @property
    def dropped(self) -> int:
        """Spans that are not kept any more."""
        return self._dropped

    def tracks(self) -> dict[str, list[Span]]:
        """Spans by track, by begin: training, snapshot, transfer and queue first, then workers as they came."""
        with self._lock:
            found = {name: list(spans) for name, spans in self._tracks.items()}
        ours = [name for name in OURS if name in found]
        names = ours + [name for name in found if name not in ours]
        return {name: sorted(found[name], key=lambda each: (each.start_s, -each.end_s)) for name in names}

    def summary(self) -> TimelineSummary:
        """How long training waited, and how much of the evaluations it did not notice."""
        tracks = self.tracks()
        spans = [span for each in tracks.values() for span in each]
        if not spans:
            return TimelineSummary()
        training = tracks.get(TRAINING, [])
        waits = _union(span for span in training if span.name == WAIT)
        snapshots = _union(tracks.get(SNAPSHOT, ()))
        trained = _Covered(_without(_union(each for each in training if each.name != WAIT), [*waits, *snapshots]))
        workers = {name: each for name, each in tracks.items() if name not in OURS}
        evaluations = [span for each in workers.values() for span in each]
        return TimelineSummary(
            wall_s=max(each.end_s for each in spans) - min(each.start_s for each in spans),
            snapshot_s=_length(snapshots),
            waited_s=_length(waits),
            evaluation_s=sum(each.duration_s for each in evaluations),
            hidden_s=sum(trained.before(each.end_s) - trained.before(each.start_s) for each in evaluations),
            snapshots=len(tracks.get(SNAPSHOT, ())),
            evaluations=len(evaluations),
            busy_s={name: _length(_union(each)) for name, each in workers.items()},
        )

    def chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Writes it for chrome://tracing and Perfetto, and gives the path. Raises: OSError."""
        tracks = self.tracks()
        origin = min((each.start_s for spans in tracks.values() for each in spans), default=0.0)
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "skyward"}}]
        thread = 0
        for name, spans in tracks.items():
            # What overlaps without being nested is no thread to a viewer: it gets rows of its own.
            for row in [spans] if name == TRAINING else rows_of(spans):
                thread += 1
                where = {"pid": 1, "tid": thread}
                events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
                events.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread}})
                events += (
                    {
                        "ph": "X",
                        "name": each.name,
                        "cat": name,
                        "ts": round((each.start_s - origin) * 1e6, 3),
                        "dur": round(each.duration_s * 1e6, 3),
                        **where,
                        "args": each.args,
                    }
                    for each in row
                )
        trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_s": origin}}
        return _write(path, json.dumps(trace, separators=(",", ":"), allow_nan=False))

    def html(self, path: str | os.PathLike[str], *, title: str = "Training and its evaluations") -> Path:
        """Writes one page that loads nothing from anywhere, and gives its path. A file that is there is replaced.

        Raises: OSError.
        """
        from .timeline_page import page_of

        return _write(path, page_of(self, title=title))


def rows_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans, by begin, in as few rows as have no two that overlap."""
    rows: list[list[Span]] = []
    for span in spans:
        free = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)  # JSON has no infinities
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


_Interval = tuple[float, float]


def _union(spans: Iterable[Span]) -> list[_Interval]:
    return _merged((each.start_s, each.end_s) for each in spans)


def _merged(intervals: Iterable[_Interval]) -> list[_Interval]:
    found: list[_Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _length(intervals: Iterable[_Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _without(intervals: Iterable[_Interval], others: Iterable[_Interval]) -> list[_Interval]:
    """What is left of intervals, in order and without overlaps, where the others are taken out."""
    left: list[_Interval] = []
    holes = deque(_merged(others))
    for begin, end in intervals:
        start = begin
        while holes and holes[0][0] < end:
            hole_start, hole_end = holes[0]
            if start < hole_start:
                left.append((start, hole_start))
            start = max(start, hole_end)
            if hole_end > end:
                break  # it may reach into the next one
            holes.popleft()
        if start < end:
            left.append((start, end))
    return left


class _Covered:
    """How much of the time before an instant lies in intervals that do not overlap and are in order."""

    def __init__(self, intervals: Sequence[_Interval]) -> None:
        self._intervals = intervals
        self._starts = [start for start, _ in intervals]
        self._sums = [0.0, *accumulate(end - start for start, end in intervals)]

    def before(self, instant_s: float) -> float:
        at = bisect_right(self._starts, instant_s)
        if at == 0:
            return 0.0
        start, end = self._intervals[at - 1]
        return self._sums[at - 1] + min(end, instant_s) - start


def _write(path: str | os.PathLike[str], text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file
