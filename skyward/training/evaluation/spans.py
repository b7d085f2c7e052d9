"""Spans of time by track, and their totals. Standard library only."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

TRAINING, SNAPSHOT, TRANSFER, QUEUE = "training", "snapshot", "transfer", "queue"
"""Tracks of training, its pauses for copies, and the way of evaluations to a worker. Any other track is a worker."""
OURS = (TRAINING, SNAPSHOT, TRANSFER, QUEUE)
WAIT = "wait"
"""Name of a span in the training track in which training waits for an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Activity from `start_s` to `end_s`, seconds since 1970, with plain values in `args`."""

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
    """Totals of a timeline in seconds, over the spans that are kept.

    Example:
        >>> from skyward.training.evaluation import Timeline
        >>> timeline = Timeline()
        >>> timeline.add("snapshot", "step 50", 2.0, 2.5)
        >>> timeline.summary().stood_still_s
        0.5
    """

    wall_s: float = 0.0
    """Time from the first begin to the last end."""
    snapshot_s: float = 0.0
    """Time that training paused to copy its weights."""
    waited_s: float = 0.0
    """Time that training waited for evaluations."""
    evaluation_s: float = 0.0
    """Time of all workers together."""
    hidden_s: float = 0.0
    """Part of `evaluation_s` during which training continued."""
    snapshots: int = 0
    evaluations: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    """Time by worker in which it had at least one evaluation."""

    @property
    def stood_still_s(self) -> float:
        """Time in which training did not train: copies and waits."""
        return self.snapshot_s + self.waited_s


TimelineSummary.__module__ = __package__


def summary_of(tracks: Mapping[str, Sequence[Span]]) -> TimelineSummary:
    """Sum up spans; each track's spans are in the order of their begin."""
    spans = [span for track in tracks.values() for span in track]
    if not spans:
        return TimelineSummary()
    training = tracks.get(TRAINING, [])
    waits = _union(span for span in training if span.name == WAIT)
    snapshots = _union(tracks.get(SNAPSHOT, ()))
    trained = _Covered(_without(_union(span for span in training if span.name != WAIT), [*waits, *snapshots]))
    workers = {name: worker for name, worker in tracks.items() if name not in OURS}
    evaluations = [span for worker in workers.values() for span in worker]
    return TimelineSummary(
        wall_s=max(span.end_s for span in spans) - min(span.start_s for span in spans),
        snapshot_s=_length(snapshots),
        waited_s=_length(waits),
        evaluation_s=sum(evaluation.duration_s for evaluation in evaluations),
        hidden_s=sum(
            trained.before(evaluation.end_s) - trained.before(evaluation.start_s) for evaluation in evaluations
        ),
        snapshots=len(tracks.get(SNAPSHOT, ())),
        evaluations=len(evaluations),
        busy_s={name: _length(_union(worker)) for name, worker in workers.items()},
    )


def rows_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Distribute spans, in the order of their begin, over as few rows as possible without overlaps."""
    rows: list[list[Span]] = []
    for span in spans:
        free = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


_Interval = tuple[float, float]


def _union(spans: Iterable[Span]) -> list[_Interval]:
    return _merged((span.start_s, span.end_s) for span in spans)


def _merged(intervals: Iterable[_Interval]) -> list[_Interval]:
    merged: list[_Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[_Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _without(intervals: Iterable[_Interval], others: Iterable[_Interval]) -> list[_Interval]:
    """Subtract `others` from intervals that are in order and do not overlap."""
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
                break  # this hole may reach into the next interval
            holes.popleft()
        if start < end:
            left.append((start, end))
    return left


class _Covered:
    """Cumulated length, before an instant, of intervals that are in order and do not overlap."""

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
