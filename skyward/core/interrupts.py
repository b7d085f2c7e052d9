"""Deferral of signal handlers while the engine's ledger is locked.

Python runs signal handlers in the main thread between any two bytecodes, and a handler may raise: KeyboardInterrupt for
Ctrl-C, SystemExit for SIGTERM, a time limit's exception for SIGALRM. A call from the main thread updates the scheduler
and reads the socket in that same thread, which saves a thread switch per call. An exception in the middle would lose
results of other calls, or leave a lock held. So during those few microseconds a signal is only recorded, and its
handler runs afterwards.

Blocking the signals does not help: another thread would receive them, and Python would still run the handler here.
Reading all handlers costs about one microsecond per `hold`. There is no notification for a new handler, and time limits
install theirs again and again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its getsignal creates no enum, and it runs for every call
import _thread
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_ALL = tuple(sorted(map(int, signal.valid_signals())))
_LAST_STANDARD = 31
_FAULTS = frozenset(
    int(getattr(signal, f"SIG{name}", 0)) for name in ("ILL", "TRAP", "BUS", "FPE", "SEGV", "STKFLT", "SYS")
)
_NEVER_HANDLED = frozenset(int(getattr(signal, name, 0)) for name in ("SIGKILL", "SIGSTOP"))
_SLICE_S = 0.25
_MOST_SIGNALS = 3
_STANDARD = tuple(n for n in _ALL if n <= _LAST_STANDARD and n not in _FAULTS | _NEVER_HANDLED)
"""Signals whose handlers are read in every `hold`. Those of faults and the real-time signals seldom have handlers of
Python's, and reading them too would more than double the cost. They are read in the first hold and whenever another
handler has changed."""
_get_ident, _getsignal = threading.get_ident, _signal.getsignal
_main = threading.main_thread().ident
_depth = 0
_noted: dict[int, FrameType | None] = {}
_known: list[Any] = []
"""Handlers of `_STANDARD` at the last check."""


class _Deferring:
    """Wrapper around a handler of the user, which defers it during `hold`."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _depth:
            _noted[number] = frame
        elif _is_within_del(frame):
            # Python prints and drops exceptions raised inside `__del__`, so the signal is sent again a little later.
            _thread.start_new_thread(_send_again, (number,))
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
    """Defer signal handlers from here on, if this is the main thread. Nests."""
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
    """End a `hold`. Raises here whatever a deferred handler raises."""
    global _depth
    if _get_ident() != _main:
        return
    _depth = max(0, _depth - 1)
    if _noted and not _depth:
        _call_noted()


def _call_noted() -> None:
    """Run all deferred handlers, even if one raises."""
    number = next(iter(_noted))
    frame, handler = _noted.pop(number), _getsignal(number)
    try:
        if callable(handler):
            handler(number, frame)
    finally:
        if _noted:
            _call_noted()


def waiting(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """Call `wait(timeout_s)` within a `hold`, but let signals interrupt it."""
    global _depth
    if _get_ident() != _main:
        return wait(timeout_s)
    try:
        let_go()
        return wait(timeout_s)
    finally:
        _depth += 1  # without reading the handlers; the next `hold` notices new ones


def wait_for(wait: Callable[[float | None], bool], timeout_s: float | None = None) -> None:
    """Call `wait(slice_s)` until it returns true or the time is over, without delaying signals.

    CPython checks for signals before it blocks on a lock, but not atomically. A Ctrl-C in between, while another thread
    takes the GIL, is noticed only when the wait ends. So the main thread waits in slices.
    """
    if _get_ident() != _main:
        wait(timeout_s)
        return
    deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    while not wait(min(_SLICE_S, max(0.0, deadline - time.monotonic()))) and time.monotonic() < deadline:
        continue


def has_ended(thread: threading.Thread, within_s: float = _SLICE_S) -> bool:
    """Wait for a thread that was started, and return whether it has ended. Delays signals, so keep the wait short.

    Before Python 3.13, an exception that a signal handler raises in `join` or `is_alive` marks the thread as ended
    although it still runs. The code that waits for it then goes on too early.
    """
    hold()
    try:
        thread.join(within_s)
        return not thread.is_alive()
    finally:
        let_go()


def is_from_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised the error. Then it is meant for the user, whatever was going on."""
    if isinstance(error, KeyboardInterrupt):  # from Python's own handler, perhaps without our wrapper
        return _get_ident() == _main
    codes = {_Deferring.__call__.__code__, *(getattr(_getsignal(n), "__code__", None) for n in _STANDARD)}
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code in codes:  # a handler of the user's own is wrapped at the next hold only
            return True
        frames = frames.tb_next
    return False


def restore() -> None:
    """Put the user's handlers back, after the last pool is closed."""
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


def shielded(action: Callable[[], T]) -> T:
    """Run the end of machines, which no signal interrupts; raise what a signal handler raised afterwards.

    Only the third signal leaves at once, and then the keeper, another process, goes on. The action runs in a thread of
    its own, because Python delivers signals to the main thread: an interrupt cannot hit the action in the middle.
    """
    if threading.current_thread() is not threading.main_thread():
        return action()
    outcome: list[T] = []
    failure: list[BaseException] = []

    def act() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=act, name="skyward-ending", daemon=True)
    hold()  # until `_outlast` is ready for what a handler raises
    try:
        thread.start()
    except RuntimeError:  # no more threads can start: run it here, unshielded
        let_go()
        return action()
    raised = _outlast(thread)
    if failure:
        raise failure[0]
    if raised:
        raise raised[0]
    return outcome[0]


def _outlast(thread: threading.Thread) -> list[BaseException]:
    """End the caller's hold, and wait for the thread. Return what signal handlers raised, but raise the third."""
    raised: list[BaseException] = []
    told = 0
    is_held = is_running = True
    while is_running:
        try:
            if is_held:
                is_held = False
                let_go()
            if told < len(raised):
                told = len(raised)
                _say_that_machines_end("twice" if told == 1 else "once")
            is_running = not has_ended(thread)
        except BaseException as error:  # raised by a signal handler: Ctrl-C, SIGTERM, a time limit
            raised.append(error)
            if len(raised) == _MOST_SIGNALS:
                raise
    return raised


def _say_that_machines_end(often: str) -> None:
    import logging  # here, because `import skyward` does without it

    logging.getLogger(__name__).warning(
        "skyward is terminating machines; press Ctrl-C %s more to leave that to the keeper", often
    )
