"""Choice of the view that a pool gets: the live view, plain lines, or the outputs of a notebook."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Literal, Protocol

from ..events import Event
from .activity import Counts
from .log_handler import install_handler
from .plain import PlainView
from .shell import ipython_shell, is_notebook

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
    if not os.isatty(fd):
        return "plain"
    from .terminal import fits  # here and below: most programs show no view, and have no use for it

    return "live" if fits(fd) else "plain"


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
    if mode == "plain":
        return PlainView(name, is_quiet=is_quiet)
    if mode == "live":
        from .live_view import LiveView

        return LiveView(name, counts, delay_s=_CALM_S if is_quiet else 0.0, is_quiet=is_quiet)
    from .notebook import NotebookView

    return NotebookView(name, counts, failures=PlainView(name, is_quiet=True), is_quiet=is_quiet)
