"""Guards of user code in a slot: a cancel interrupts nothing else, and a process that it forked ends in time."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import NoReturn, Protocol

from .execute import Cancelled
from .page import CANCEL, CURRENT, ENDED, INDEX, PAGE_GROUP

_IMPORT = "<frozen importlib._bootstrap>"
_AGAIN_S = 0.05
"""Pause before a cancel checks again whether an import has ended, in seconds."""


class _Closable(Protocol):
    """The part of a lane's inbox that a guard reads."""

    guard: LaneGuard | None
    is_closed: bool


class _Region:
    """A `with` block that runs user code, or our code within it. Cheaper than a generator, because tasks are short."""

    def __init__(self, guard: SlotGuard, *, inside: bool) -> None:
        self._guard = guard
        self._inside = inside

    def __enter__(self) -> None:
        self._guard.enter(self._inside)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._guard.is_copy:
            _end_copy(error)
        # A cancel on leaving user code would discard its result; on re-entering it no result exists yet.
        if self._inside or kind is not None:
            self._guard.leave()
        else:
            self._guard.enter(True)


class SlotGuard:
    """Lets a cancel interrupt user code, and only user code, of the intended task."""

    def __init__(self, page: memoryview, lane: int, interrupts: bool) -> None:
        self._page = page
        self._base = lane * PAGE_GROUP
        self._in_user_code = False
        self.is_copy = False
        """Whether user code forked this process. Then the task's remaining steps belong to the original process."""
        os.register_at_fork(after_in_child=self._on_fork)
        self._user_region = _Region(self, inside=True)
        self._our_region = _Region(self, inside=False)
        if interrupts:
            signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_fork(self) -> None:
        self.is_copy = True

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if not (self._in_user_code and self.is_cancelled):
            return
        if _is_importing(frame):
            # An interrupted import leaves half-imported modules behind, which break the next import of the package in
            # every later call of this process. So wait. An import that outlasts the cancel's grace period ends with
            # its process. Not a `threading` thread, because the import may hold that module's locks.
            _thread.start_new_thread(self._interrupt_later, ())
            return
        self._in_user_code = False  # interrupt only once: from here on the task unwinds
        raise KeyboardInterrupt

    def _interrupt_later(self) -> None:
        time.sleep(_AGAIN_S)
        if self.is_cancelled:  # else the task has ended, and the next one may handle SIGINT itself
            os.kill(os.getpid(), signal.SIGINT)

    @property
    def is_cancelled(self) -> bool:
        current = self._page[self._base + CURRENT]
        return current != 0 and self._page[self._base + CANCEL] == current

    def user_code(self) -> _Region:
        return self._user_region

    def our_code(self) -> _Region:
        """Mark a block within user code in which frames are read or sent."""
        return self._our_region

    def enter(self, is_user_code: bool) -> None:
        self._in_user_code = is_user_code
        if is_user_code and self.is_cancelled:
            self._in_user_code = False
            raise KeyboardInterrupt

    def leave(self) -> None:
        self._in_user_code = False

    def begin(self, task: int) -> None:
        self._page[self._base + INDEX] = 0
        self._page[self._base + CURRENT] = task

    def end(self) -> None:
        self._page[self._base + CURRENT] = 0
        self._page[self._base + ENDED] += 1

    @property
    def index_cell(self) -> tuple[memoryview, int]:
        return self._page, self._base + INDEX


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


class LaneGuard(SlotGuard):
    """Guard of a lane of a thread slot. `cancel` raises in the lane's thread while it runs the task's user code.

    Created by the lane's thread. Python delivers the exception between two bytecodes, at a time of its own choice. It
    may still arrive in our own bytecodes that lead out of user code, but no later: `leave` waits for an exception that
    has not arrived, and drops it.
    """

    def __init__(self, page: memoryview, lane: int) -> None:
        super().__init__(page, lane, interrupts=False)
        # Held while an exception is set and while user code is left. Otherwise `cancel` could see user code, lose the
        # processor, and raise in our own code, or in the next task.
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._inbox: _Closable | None = None
        self._task = 0
        self._is_wanted = False
        self._is_raised = False

    def begin_with(self, inbox: _Closable) -> None:
        """Attach the inbox of the next task, which may have been cancelled while it waited for a lane."""
        self._inbox = inbox
        inbox.guard = self

    def cancel(self, task: int) -> None:
        """Cancel the task if this lane runs it. Called by another thread."""
        with self._lock:
            if task == self._task and not self._is_raised:
                self._is_wanted = True
                if self._in_user_code:
                    self._is_raised = True
                    _set_exception(self._thread, Cancelled)

    def was_told(self) -> None:
        """Note that the task has read its cancellation and unwinds, so that no second exception follows."""
        with self._lock:
            self._is_raised = True

    def enter(self, is_user_code: bool) -> None:
        with self._lock:
            self._in_user_code = is_user_code
            is_due = is_user_code and self._is_wanted and not self._is_raised
            if is_due:
                self._is_raised, self._in_user_code = True, False
            elif not is_user_code:
                self._take_back()
        if is_due:
            raise Cancelled

    def leave(self) -> None:
        with self._lock:
            self._in_user_code = False
            self._take_back()

    def begin(self, task: int) -> None:
        super().begin(task)
        with self._lock:
            self._task = task
            self._is_wanted = self._inbox is not None and self._inbox.is_closed
            self._is_raised = False

    def end(self) -> None:
        with self._lock:
            self._in_user_code = False
            self._task = 0
            self._take_back()
        self._inbox = None
        super().end()

    def _take_back(self) -> None:
        """Let an exception arrive here if it has not arrived yet. Called by the lane's thread."""
        # PyThreadState_SetAsyncExc(thread, NULL) would withdraw it. But Python 3.11 then believes for ever that an
        # exception waits: it checks at each call and, under a debugger's trace function, goes round in circles.
        if self._is_raised:
            try:
                for _ in range(2):  # Python raises at the jump of a loop
                    continue
            except Cancelled:  # meant for user code, which has ended
                return


def _set_exception(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in another thread between two bytecodes. Python has no way to kill a thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _end_copy(error: BaseException | None) -> NoReturn:
    """End as a script would: exit code 0, the argument of `sys.exit()`, or a traceback and 1."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        code = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by the user
            stream.flush()
    os._exit(code & 0xFF)
