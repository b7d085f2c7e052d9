"""A pool in a notebook: a line that follows it, and bars that stay in place below the cell that runs."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..core.html import bar, lines
from ..events import Event, PoolClosed, PoolReady
from .activity import Counts, Progress, RunningTask
from .panel import clock_of, done_of, progress_line, rate_of, status_line
from .state import PoolState
from .style import Style

_log = logging.getLogger(__name__)

_EVERY_S = 0.3
_CALM_S = 0.5
"""Seconds after which a map gets a bar: most are over by then."""
_LAST_WORDS_S = 2.0
_WIDTH = 90
"""Columns of the plain form of a bar, which is shown where no HTML is."""
_STYLE = Style(has_colour=False)


class _Failures(Protocol):
    def emit(self, event: Event) -> None: ...
    def close(self) -> None: ...


class _CellOutput:
    """One output of the cell that ran when it was made; it can be replaced later, from any thread."""

    def __init__(self, plain: str, html: str = "") -> None:
        from IPython.display import display  # only in a notebook

        show: Any = display
        self._shown = (plain, html)
        # From a thread without a cell of its own it lands in the cell that runs now.
        self._handle: Any = show(_bundle(plain, html), raw=True, display_id=True)

    def replace(self, plain: str, html: str = "") -> None:
        if (plain, html) != self._shown:
            self._shown = (plain, html)
            with contextlib.suppress(Exception):  # the notebook was closed: nobody is there to see it
                self._handle.update(_bundle(plain, html), raw=True)


def _bundle(plain: str, html: str) -> dict[str, str]:
    return {"text/plain": plain, "text/html": html} if html else {"text/plain": plain}


class NotebookView:
    """The view of a pool in a notebook.

    Args:
        counts: return the calls of the pool, now; None if it has none yet.
        failures: shows what goes wrong.
        is_quiet: show no line of the pool itself, only bars.
    """

    wants_usage = False

    def __init__(self, name: str, counts: Callable[[], Counts | None], *, failures: _Failures, is_quiet: bool) -> None:
        self._state = PoolState(name)
        self._counts = counts
        self._failures = failures
        self._lock = threading.Lock()
        self._painting = threading.Lock()
        self._changed = threading.Event()
        self._is_closed = False
        self._is_broken = False
        self._line = None if is_quiet else _CellOutput(f"{name}: starting")
        self._maps: dict[Progress, _CellOutput] = {}
        self._tasks: _CellOutput | None = None
        self._thread = threading.Thread(target=self._follow, name="skyward-console", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._state.take(event)
        self._failures.emit(event)
        if isinstance(event, PoolReady | PoolClosed):
            self._changed.set()

    def shows_progress(self) -> bool:
        return not self._is_closed

    def settle(self) -> None:
        if self._maps or self._tasks is not None:  # else nothing is shown: the way of most short calls
            self._show()

    def _follow(self) -> None:
        while not self._is_closed:
            self._changed.wait(_EVERY_S)
            self._changed.clear()
            self._show()

    def _show(self) -> None:
        """Update the outputs. The first error is logged and ends the view, because no view may end a call."""
        if self._is_broken:
            return
        try:
            self._update()
        except Exception:
            self._is_broken = True
            _log.exception("the notebook's view of pool %s stopped", self._state.name)

    def _update(self) -> None:
        with self._painting:
            counts = self._counts()  # not under the other lock: the engine emits under its own
            now = time.time()
            if self._line is not None:
                with self._lock:
                    line = status_line(self._state, now)
                self._line.replace(line)
            self._update_maps(() if counts is None else counts.progress, now)
            self._update_tasks(() if counts is None else counts.running)

    def _update_maps(self, entries: tuple[Progress, ...], now: float) -> None:
        for progress in entries:
            if progress not in self._maps and progress.ended is None and progress.seconds(now) >= _CALM_S:
                self._maps[progress] = _CellOutput(*_map_forms(progress, now))
        for progress, output in list(self._maps.items()):
            output.replace(*_map_forms(progress, now))
            if progress.ended is not None:
                del self._maps[progress]

    def _update_tasks(self, running: tuple[RunningTask, ...]) -> None:
        """Show the progress lines of tasks in one output; it is emptied when their last states are printed."""
        texts = [f"[node {task.node}] {task.progress}" for task in running if task.progress]
        if self._tasks is not None:
            self._tasks.replace("\n".join(texts), lines(texts) if texts else " ")
            if not texts:
                self._tasks = None
        elif texts:
            self._tasks = _CellOutput("\n".join(texts), lines(texts))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._changed.set()
        self._thread.join(_LAST_WORDS_S)
        self._show()
        self._failures.close()


def _map_forms(progress: Progress, now: float) -> tuple[str, str]:
    """Return a map or a group as plain text and as HTML."""
    plain = progress_line(progress, _WIDTH, now, _STYLE, indent=0)
    texts = [done_of(progress)]
    if progress.done and progress.seconds(now) > 0:
        texts.append(rate_of(progress, now))
    if clock := clock_of(progress, now):
        texts.append(clock)
    part = None if progress.total is None else progress.done / progress.total if progress.total else 1.0
    return plain, bar(progress.name, part, " · ".join(texts))
