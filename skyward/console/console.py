"""Which of the views a pool has, and how events reach it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from ..events import Event, PoolClosed, PoolReady, PoolStarted
from .log_handler import install_handler
from .outlet import notices, notify
from .panel import Counts, Style, panel_lines, status_line
from .plain import PlainLines
from .state import PoolState
from .terminal import Terminal, fits
from .words import duration, usd

__all__ = ["Console", "Mode", "ipython_shell", "mode_here", "open_console"]

Mode = Literal["live", "notebook", "plain"]

_CALM_S = 2.0
"""Seconds after which the live view of a pool appears that may be over by then: most of `sky.Local()` are."""
_NOTEBOOK_S = 0.5
_LAST_WORDS_S = 2.0


class Console(Protocol):
    """What a pool tells its events. `emit` is called by any thread, under locks of ours: it must not wait."""

    wants_usage: bool
    """Whether it shows how busy the nodes are, so that they must be asked."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None:
        """The pool is closed: show its last state and give everything back. Idempotent."""
        ...


def mode_here() -> Mode:
    """What standard error of this process can show."""
    shell = ipython_shell()
    if shell is not None and hasattr(shell, "kernel"):
        return "notebook"
    if shell is not None or hasattr(sys, "ps1") or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return "plain"  # a prompt that edits its line erases what is below it
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return "plain"  # some give their jobs a terminal, and keep a log of what is written there
    try:
        fd = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or a notebook's
        return "plain"
    return "live" if os.isatty(fd) and fits(fd) else "plain"


def open_console(
    wanted: bool | None, *, name: str, is_quick: bool, counts: Callable[[], Counts | None]
) -> Console | None:
    """The view of a pool that is about to start; log records of the pool are shown from now on, with or without it.

    Args:
        wanted: False: none. None: of a quick pool only what goes wrong, and the live view after two seconds. True: all.
        is_quick: it starts in a moment and costs nothing, so nothing need be said of it.
        counts: of its calls, now; None where it has none yet.
    """
    install_handler()
    if wanted is False:
        return None
    mode = mode_here()
    is_quiet = is_quick and not wanted
    if mode == "live":
        return _LiveView(name, counts, delay_s=_CALM_S if is_quiet else 0.0, is_quiet=is_quiet)
    if mode == "notebook" and not is_quiet:
        return _NotebookLine(name)
    return _PlainView(name, is_quiet=is_quiet)


class _PlainView:
    """Lines on standard error."""

    wants_usage = False

    def __init__(self, name: str, *, is_quiet: bool) -> None:
        self._lines = PlainLines(name, is_quiet=is_quiet)
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock:
            for line in self._lines.take(event):
                notify(line)

    def close(self) -> None:
        notices.flush()


class _LiveView:
    """Lines at the bottom of the terminal; see terminal."""

    wants_usage = True

    def __init__(self, name: str, counts: Callable[[], Counts | None], *, delay_s: float, is_quiet: bool) -> None:
        self._state = PoolState(name)
        self._counts = counts
        self._lock = threading.Lock()
        self._is_quiet = is_quiet
        self._failures = _PlainView(name, is_quiet=True)
        self._has_failed = False
        encoding = getattr(sys.stderr, "encoding", "") or ""
        self._style = Style(has_colour=not os.environ.get("NO_COLOR"), has_unicode=encoding.lower().startswith("utf"))
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
                self._terminal.add(self._lines)

    def _lines(self, width: int, most: int) -> list[str]:
        counts = self._counts()  # not under our lock: the engine emits under its own
        with self._lock:
            height = min(most, len(self._state.nodes) + 2)
            now = time.time()
            return panel_lines(self._state, counts, width=width, height=max(3, height), now=now, style=self._style)

    def close(self) -> None:
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
            self._timer.cancel()
        self._terminal.remove(self._lines)
        self._failures.close()
        if was_open and not self._is_quiet and not self._has_failed:
            now = time.time()
            spent = self._state.spent_usd(now)
            cost = f", cost {usd(spent)} by the prices of its offers" if spent else ""
            notify(f"{self._state.name}: closed after {duration(now - self._state.began)}{cost}")
            notices.flush()


class _NotebookLine:
    """One line of output, in the cell that opened the pool, that follows it."""

    wants_usage = False

    def __init__(self, name: str) -> None:
        from IPython.display import display  # only in a notebook

        self._state = PoolState(name)
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._is_closed = False
        self._line = f"{name}: starting"
        show: Any = display
        self._handle: Any = show({"text/plain": self._line}, raw=True, display_id=True)
        self._thread = threading.Thread(target=self._follow, name="skyward-console", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._state.take(event)
        if isinstance(event, PoolReady | PoolClosed):
            self._changed.set()

    def _follow(self) -> None:
        while not self._is_closed:
            self._changed.wait(_NOTEBOOK_S)
            self._changed.clear()
            self._update()

    def _update(self) -> None:
        with self._lock:
            line = status_line(self._state, time.time())
        if line != self._line:
            self._line = line
            with contextlib.suppress(Exception):  # the notebook was closed: there is nobody to tell
                self._handle.update({"text/plain": line}, raw=True)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._changed.set()
        self._thread.join(_LAST_WORDS_S)
        self._update()


def ipython_shell() -> Any:
    """The IPython shell that this program runs in, if it does."""
    module = sys.modules.get("IPython")
    get = getattr(module, "get_ipython", None)
    return get() if get is not None else None
