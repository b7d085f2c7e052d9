"""Choice of the view that a pool gets: the live view, plain lines, or the outputs of a notebook."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

from ..events import Event, PoolClosed, PoolStarted
from .activity import Counts, WorkTracker
from .log_handler import install_handler
from .notebook import NotebookView
from .outlet import notices, notify
from .panel import panel_height, panel_lines
from .plain import PlainLines
from .shell import ipython_shell, is_notebook
from .state import PoolState, closing_words
from .style import Style, has_many_colours
from .terminal import Terminal, fits

Mode = Literal["live", "notebook", "plain"]

_CALM_S = 2.0
"""Seconds before the live view of a quick pool appears. Most pools of `sky.Local()` are closed by then."""


class Console(Protocol):
    """View of one pool. Any thread may call its methods, also while it holds locks of the pool: they must not block."""

    wants_usage: bool
    """Whether it shows the load of the nodes, so that they must be polled."""

    def shows_progress(self) -> bool:
        """Return whether progress bars of tasks are shown in place now."""
        ...

    def settle(self) -> None:
        """Bring bars up to date at once: a map has ended, or the last state of a task's bar is about to be printed."""
        ...

    def emit(self, event: Event) -> None: ...

    def close(self) -> None:
        """Show the last state of the pool, and give the terminal back. Idempotent."""
        ...


def mode_here() -> Mode:
    """Return the best mode for standard error of this process."""
    if is_notebook():
        return "notebook"
    if ipython_shell() is not None or hasattr(sys, "ps1") or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return "plain"  # a prompt that edits its line erases the lines below it
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return "plain"  # some CI systems give jobs a terminal, and log everything that is written there
    try:
        fd = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or a notebook's
        return "plain"
    return "live" if os.isatty(fd) and fits(fd) else "plain"


def open_console(
    wanted: bool | None, *, name: str, is_quick: bool, counts: Callable[[], Counts | None]
) -> Console | None:
    """Return the view of a pool that is about to start. From now on its log records are shown, too.

    Args:
        name: unique name of the pool.
        wanted: True shows everything, False nothing. None shows only problems of a quick pool, and the live view
            after two seconds.
        is_quick: whether the pool starts in a moment and costs nothing.
        counts: return the calls of the pool; None before it is ready.
    """
    install_handler()
    if wanted is False:
        return None
    mode = mode_here()
    is_quiet = is_quick and not wanted
    if mode == "live":
        return _LiveView(name, counts, delay_s=_CALM_S if is_quiet else 0.0, is_quiet=is_quiet)
    if mode == "notebook":
        return NotebookView(name, counts, failures=_PlainView(name, is_quiet=True), is_quiet=is_quiet)
    return _PlainView(name, is_quiet=is_quiet)


class _PlainView:
    """Plain lines on standard error."""

    wants_usage = False

    def __init__(self, name: str, *, is_quiet: bool) -> None:
        self._lines = PlainLines(name, is_quiet=is_quiet)
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock:
            for line in self._lines.take(event):
                notify(line)

    def shows_progress(self) -> bool:
        return False

    def settle(self) -> None:
        return

    def close(self) -> None:
        notices.flush()


class _LiveView:
    """Lines that stay at the bottom of the terminal; see `terminal`."""

    wants_usage = True

    def __init__(self, name: str, counts: Callable[[], Counts | None], *, delay_s: float, is_quiet: bool) -> None:
        self._state = PoolState(name)
        self._counts = counts
        self._lock = threading.Lock()
        self._is_quiet = is_quiet
        self._failures = _PlainView(name, is_quiet=True)
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
