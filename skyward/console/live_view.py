"""The view of a pool at the bottom of a terminal. It is imported only where there is one."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from ..events import Event, PoolClosed, PoolStarted
from .activity import Counts, WorkTracker
from .outlet import notices, notify
from .panel import panel_height, panel_lines
from .plain import PlainView
from .state import PoolState, closing_words
from .style import Style, has_many_colours
from .terminal import Terminal


class LiveView:
    """Lines that stay at the bottom of the terminal; see `terminal`."""

    wants_usage = True

    def __init__(self, name: str, counts: Callable[[], Counts | None], *, delay_s: float, is_quiet: bool) -> None:
        self._state = PoolState(name)
        self._counts = counts
        self._lock = threading.Lock()
        self._is_quiet = is_quiet
        self._failures = PlainView(name, is_quiet=True)
        self._has_failed = False
        encoding = getattr(sys.stderr, "encoding", "") or ""
        self._style = Style(
            has_colour=not os.environ.get("NO_COLOR"),
            has_unicode=encoding.lower().startswith("utf"),
            has_many_colours=has_many_colours(),
        )
        self._work = WorkTracker()
        self._height = 0
        self._is_shown = False
        self._terminal = Terminal.at(sys.stderr.fileno())
        self._timer = threading.Timer(delay_s, self._show)
        self._timer.daemon = True
        self._is_closed = False

    def emit(self, event: Event) -> None:
        with self._lock:
            self._state.take(event)
            if isinstance(event, PoolStarted):
                self._timer.start()
            self._has_failed |= isinstance(event, PoolClosed) and bool(event.reason)
        self._failures.emit(event)

    def _show(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_shown = True
                self._terminal.add(self._lines)

    def shows_progress(self) -> bool:
        return self._is_shown and not self._is_closed

    def settle(self) -> None:
        return  # it paints eight times a second anyway

    def _lines(self, width: int, most: int) -> list[str]:
        counts = self._counts()  # without our lock: the engine emits events under its own
        with self._lock:
            # It never shrinks: the output above it would jump each time that a map begins or ends.
            self._height = max(self._height, panel_height(self._state, counts))
            now = time.time()
            return panel_lines(
                self._state,
                counts,
                width=width,
                height=max(3, min(most, self._height)),
                now=now,
                style=self._style,
                work=self._work.update(counts.running, now) if counts is not None else None,
            )

    def close(self) -> None:
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
            self._timer.cancel()
        self._terminal.remove(self._lines)
        self._failures.close()
        if was_open and (self._is_shown or not self._is_quiet) and not self._has_failed:
            notify(f"{self._state.name}: {closing_words(self._state, time.time())}")
            notices.flush()
