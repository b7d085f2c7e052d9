"""Ctrl-C waits while the engine's books are open.

Python raises KeyboardInterrupt in the main thread, between any two bytecodes. A call from the main thread changes
the scheduler and reads the socket in that very thread (one change of thread less for each call), and an exception in
the middle of that would lose other calls' results. So in those few microseconds SIGINT is only noted, and handled
when they are over. Blocking the signal would not do: another thread would receive it, and Python would still raise it
here.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its getsignal makes no enums: it is asked for each call
import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["hold", "let_go", "restore", "waiting"]

_SIGINT = int(signal.SIGINT)
_main = threading.main_thread().ident
_depth = 0
_noted: tuple[int, FrameType | None] | None = None


class _Deferring:
    """A SIGINT handler that stands before the user's own."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _noted  # the process has one main thread
        if _depth:
            _noted = (number, frame)
        elif _is_within_del(frame):
            _thread.start_new_thread(_come_again, ())  # Python would print and forget it there
        else:
            self.previous(number, frame)


def _come_again() -> None:
    time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _is_within_del(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def hold() -> None:
    """From here on SIGINT waits, if this is the main thread. Nests."""
    global _depth
    if threading.get_ident() != _main:
        return
    if not _depth:
        # Asked each time: a notebook's kernel sets its own handler for each cell.
        handler = _signal.getsignal(_SIGINT)
        if type(handler) is not _Deferring and callable(handler):
            signal.signal(signal.SIGINT, _Deferring(handler))
    _depth += 1


def let_go() -> None:
    """The end of `hold`; raises here what would have been raised there."""
    global _depth, _noted
    if threading.get_ident() != _main:
        return
    _depth = max(0, _depth - 1)
    if _noted is not None and not _depth:
        noted, _noted = _noted, None
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(*noted)


def waiting(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """`wait(timeout_s)` within `hold`: it may be interrupted."""
    try:
        let_go()
        return wait(timeout_s)
    finally:
        hold()


def restore() -> None:
    """Put the user's handler back; for when the last pool is closed."""
    if threading.get_ident() == _main:
        handler = signal.getsignal(signal.SIGINT)
        if type(handler) is _Deferring:
            signal.signal(signal.SIGINT, handler.previous)


def _forget_in_child() -> None:
    global _depth, _noted, _main
    _depth, _noted, _main = 0, None, threading.get_ident()


os.register_at_fork(after_in_child=_forget_in_child)
