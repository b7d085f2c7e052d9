"""Hold signal handlers back while the engine's ledger is locked.

Python runs signal handlers in the main thread, between any two bytecodes, and a handler may raise: KeyboardInterrupt
for Ctrl-C, SystemExit for SIGTERM, an exception of a time limit for SIGALRM. A call from the main thread changes the
scheduler and reads the socket in that very thread (one change of thread less for each call), and an exception in the
middle of that would lose other calls' results, or leave a lock taken. So in those few microseconds a signal is only
noted, and its handler runs when they are over.

Blocking the signals would not do: another thread would receive them, and Python would still run the handler here.
Asking for the handlers of all signals costs about one microsecond for each `hold`; there is no event for a handler
that is installed, and one for a time limit is installed again and again.
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

__all__ = ["hold", "is_from_handler", "let_go", "restore", "wait_for", "waiting"]

_ALL = tuple(sorted(map(int, signal.valid_signals())))
_LAST_STANDARD = 31
_SLICE_S = 0.25
_STANDARD = tuple(number for number in _ALL if number <= _LAST_STANDARD)
"""Asked each time. Real-time signals, which hardly anybody uses, double the cost: they are asked with the first hold
and whenever another handler has changed."""
_get_ident, _getsignal = threading.get_ident, _signal.getsignal
_main = threading.main_thread().ident
_depth = 0
_noted: dict[int, FrameType | None] = {}
_known: list[Any] = []
"""The handlers of `_STANDARD` when they were looked at last."""


class _Deferring:
    """Stand before a handler of the user's."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _depth:
            _noted[number] = frame
        elif _is_within_del(frame):
            _thread.start_new_thread(_send_again, (number,))  # Python would print and forget it there
        else:
            self.previous(number, frame)


def _send_again(number: int) -> None:
    time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _is_within_del(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def hold() -> None:
    """From here on signal handlers wait, if this is the main thread. Nests."""
    global _depth
    if _get_ident() != _main:
        return
    if not _depth and [*map(_getsignal, _STANDARD)] != _known:
        _stand_before_all()
    _depth += 1


def _stand_before_all() -> None:
    for number in _ALL:
        handler = _getsignal(number)
        if type(handler) is not _Deferring and callable(handler):
            signal.signal(number, _Deferring(handler))
    _known[:] = map(_getsignal, _STANDARD)


def let_go() -> None:
    """End a `hold`. Raises here what a handler would have raised there."""
    global _depth
    if _get_ident() != _main:
        return
    _depth = max(0, _depth - 1)
    if _noted and not _depth:
        _call_noted()


def _call_noted() -> None:
    """All of them, even if one raises."""
    number = next(iter(_noted))
    frame, handler = _noted.pop(number), _getsignal(number)
    try:
        if callable(handler):
            handler(number, frame)
    finally:
        if _noted:
            _call_noted()


def waiting(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """`wait(timeout_s)` within `hold`: it may be interrupted."""
    global _depth
    if _get_ident() != _main:
        return wait(timeout_s)
    try:
        let_go()
        return wait(timeout_s)
    finally:
        _depth += 1  # without a look at the handlers: the next `hold` sees what a handler installed meanwhile


def wait_for(wait: Callable[[float | None], bool]) -> None:
    """Call `wait(timeout_s)` until it is true, so that no signal is late.

    CPython looks for signals before it blocks on a lock, but not in the same step: a Ctrl-C that comes in between,
    while another thread takes the GIL, is seen only when the wait ends. So the main thread waits in slices.
    """
    if _get_ident() != _main:
        wait(None)
        return
    while not wait(_SLICE_S):
        continue


def is_from_handler(error: BaseException) -> bool:
    """Whether a signal handler raised it: it is for the user, whatever was going on."""
    if isinstance(error, KeyboardInterrupt):  # by Python's own handler, which may stand alone
        return _get_ident() == _main
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code is _Deferring.__call__.__code__:
            return True
        frames = frames.tb_next
    return False


def restore() -> None:
    """Put the user's handlers back. For when the last pool is closed."""
    if _get_ident() != _main:
        return
    for number in _ALL:
        handler = _getsignal(number)
        if type(handler) is _Deferring:
            signal.signal(number, handler.previous)
    _known.clear()


def _forget_in_child() -> None:
    global _depth, _main
    _depth, _main = 0, _get_ident()
    _noted.clear()


os.register_at_fork(after_in_child=_forget_in_child)
