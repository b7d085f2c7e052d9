"""What training, snapshots, transfers and workers did when: to see that nothing waits. Standard library only."""

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
"""Characters of a text in a span's args."""


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
            tracks = {name: list(spans) for name, spans in self._tracks.items()}
        ours = [name for name in OURS if name in tracks]
        names = ours + [name for name in tracks if name not in ours]
        return {name: sorted(tracks[name], key=lambda span: (span.start_s, -span.end_s)) for name in names}

    def summary(self) -> TimelineSummary:
        """How long training waited, and how much of the evaluations it did not notice."""
        return summary_of(self.tracks())

    def chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Writes it for chrome://tracing and Perfetto, and gives the path. Raises: OSError."""
        tracks = self.tracks()
        origin = min((span.start_s for spans in tracks.values() for span in spans), default=0.0)
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
        """Writes one page that loads nothing from anywhere, and gives its path. A file that is there is replaced.

        Raises: OSError.
        """
        from .timeline_page import page_of  # with its CSS and scripts: only where a page is written

        page = page_of(self.tracks(), dropped=self.dropped, title=title)
        return write_document(path, page)


def _plain(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)  # JSON has no infinities
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
