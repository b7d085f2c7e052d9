"""Timeline of training, snapshots, transfers and workers, to see that nothing waits. Standard library only."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..reporting.document import write_document
from .spans import OURS, QUEUE, SNAPSHOT, TRAINING, TRANSFER, WAIT, Span, TimelineSummary, rows_of, summary_of

__all__ = ["QUEUE", "SNAPSHOT", "TRAINING", "TRANSFER", "WAIT", "Span", "Timeline", "TimelineSummary"]

MOST_TRACKS = 128
OTHERS = "other workers"
LONGEST_TEXT = 300
"""Longest text in a span's args, in characters."""


class Timeline:
    """Collect spans of time. Thread-safe; an `add` takes microseconds and never waits for a reader.

    Memory is bounded: each track keeps its latest spans, and beyond 128 tracks spans go to "other workers". Spans of
    one track may overlap, for example on a worker with several slots.

    Args:
        spans_per_track: spans that each track keeps, at least 1.
        clock: seconds since 1970, for tests.

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
        """Add a finished span.

        Args:
            track: "training", "snapshot", "transfer", "queue" or the name of a worker.
            name: label of the span.
            start_s: begin, seconds since 1970.
            end_s: end; an earlier value than `start_s` (a clock that was set back) becomes `start_s`.
            **args: further values, shown with the span; others than numbers and None become text.
        """
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
        """Add the time of a `with` block; if the block raises, `error` is in the span's args.

        Args:
            track: as in `add`.
            name: as in `add`.
            **args: as in `add`.
        """
        start_s = self._clock()
        try:
            yield
        except BaseException as error:
            self.add(track, name, start_s, self._clock(), **args, error=f"{type(error).__name__}: {error}")
            raise
        self.add(track, name, start_s, self._clock(), **args)

    @property
    def dropped(self) -> int:
        """Number of spans that are no longer kept."""
        return self._dropped

    def tracks(self) -> dict[str, list[Span]]:
        """Return spans by track, in order of begin: training, snapshot, transfer and queue, then the workers."""
        with self._lock:
            tracks = {name: list(spans) for name, spans in self._tracks.items()}
        ours = [name for name in OURS if name in tracks]
        names = ours + [name for name in tracks if name not in ours]
        return {name: sorted(tracks[name], key=lambda span: (span.start_s, -span.end_s)) for name in names}

    def summary(self) -> TimelineSummary:
        """Return how long training waited, and how much of the evaluations ran beside it."""
        return summary_of(self.tracks())

    def chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the timeline for chrome://tracing and Perfetto.

        Args:
            path: the file; an existing one is replaced.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.
        """
        tracks = self.tracks()
        origin = min((span.start_s for spans in tracks.values() for span in spans), default=0.0)
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "skyward"}}]
        thread = 0
        for name, spans in tracks.items():
            # A viewer takes spans of one thread as nested; spans that overlap otherwise get threads of their own.
            for row in [spans] if name == TRAINING else rows_of(spans):
                thread += 1
                where = {"pid": 1, "tid": thread}
                events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
                events.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread}})
                events += (
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": name,
                        "ts": round((span.start_s - origin) * 1e6, 3),
                        "dur": round(span.duration_s * 1e6, 3),
                        **where,
                        "args": span.args,
                    }
                    for span in row
                )
        trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_s": origin}}
        return write_document(path, json.dumps(trace, separators=(",", ":"), allow_nan=False))

    def html(self, path: str | os.PathLike[str], *, title: str = "Training and its evaluations") -> Path:
        """Write the timeline as one HTML page that loads nothing from elsewhere.

        Args:
            path: the file; an existing one is replaced.
            title: heading of the page.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.
        """
        from .timeline_page import page_of  # reads CSS and scripts, which only a page needs

        page = page_of(self.tracks(), dropped=self.dropped, title=title)
        return write_document(path, page)


def _plain(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)  # JSON has no infinities
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
