"""Queue of handler calls that one background thread runs in order. At process exit, all queues are drained."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError

_log = logging.getLogger(__name__)

IDLE_S = 2.0
"""Idle time after which the thread ends; the next call starts another one."""


@dataclass(frozen=True, kw_only=True)
class HandlerCall:
    where: str
    """Name of the call in errors: callback, event and step."""
    handler: Callable[..., Any]
    context: dict[str, Any]


class HandlerQueue:
    """Queue of calls with a thread that runs them in order and ends when the queue stays empty.

    Args:
        name: name of the callback.
        most: calls that may wait.
        timeout_s: seconds that a caller waits for a call.
    """

    def __init__(self, name: str, most: int, timeout_s: float) -> None:
        self._name, self._most, self._timeout_s = name, most, timeout_s
        self._changed = threading.Condition()
        self._calls: deque[HandlerCall] = deque()
        self._running: HandlerCall | None = None
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._error: Exception | None = None

    @property
    def pending(self) -> int:
        with self._changed:
            return len(self._calls) + (self._running is not None)

    def put(self, call: HandlerCall) -> None:
        """Append a call; wait while the queue is full. While an error has not been taken, the call is dropped."""
        with self._changed:
            self._wait_for(lambda: len(self._calls) < self._most)
            if self._error is not None:
                return
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"callback {self._name}", daemon=True)
                self._thread.start()
                _finish_at_exit(self)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all calls are done, or one has failed."""
        with self._changed:
            self._wait_for(lambda: not self._calls and self._running is None)

    def finish(self) -> None:
        """Drain the queue and end its thread. A thread that hangs is left behind; it is a daemon."""
        self.drain()
        with self._changed:
            thread, self._is_ending = self._thread, True
            self._changed.notify_all()
        if thread is not None and self._running is None:
            thread.join()
        self._is_ending = False

    def take_error(self) -> Exception | None:
        """Return the exception of a failed call, once."""
        # Checked without the lock, because every event of a run passes here. A late error is taken at the next event.
        if self._error is None:
            return None
        with self._changed:
            error, self._error = self._error, None
            return error

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not condition() and self._error is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self._calls.clear()
                where = self._running.where if self._running is not None else self._name
                self._error = TimeoutError(
                    f"{where}: still running in the background after timeout_s={self._timeout_s:g}, and the calls "
                    "queued behind it are dropped; raise timeout_s of asynchronously()"
                )
                return
            self._changed.wait(left)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._calls and not self._is_ending:
                    self._changed.wait(IDLE_S)
                if not self._calls:
                    # Under the lock, so that `put` sees either this thread at work or none.
                    self._thread = None
                    return
                call = self._running = self._calls.popleft()
                self._changed.notify_all()
            error = _error_of(call)
            with self._changed:
                self._running = None
                if error is not None and self._error is None:
                    self._error = error
                    self._calls.clear()
                self._changed.notify_all()
            del call, error  # an idle thread must not keep their objects alive


def _error_of(call: HandlerCall) -> Exception | None:
    control = call.context.get("control")
    before = dict(vars(control)) if control is not None else {}
    try:
        answer = call.handler(**call.context)
        if answer is not None and answer is not control:
            raise _late_answer(call, "returns an answer")
        if control is not None and vars(control) != before:
            raise _late_answer(call, "changes control")
    except Exception as error:
        error.add_note(f"raised in the background, in {call.where}")
        return error
    return None


def _late_answer(call: HandlerCall, problem: str) -> UsageError:
    event = call.where.partition(" ")[0].rpartition(".")[2]
    return UsageError(
        f"{call.where}: {problem}, which would take effect at an arbitrary later step; use asynchronously(..., "
        f"in_place=({event!r},)), or pass the callback without asynchronously()"
    )


# At the end of the process ------------------------------------------------------------------------------------------

_living: weakref.WeakSet[HandlerQueue] = weakref.WeakSet()
_is_registered = False


def _finish_at_exit(queue: HandlerQueue) -> None:
    """Register a queue to be drained at exit, because the interpreter stops daemon threads without waiting."""
    global _is_registered
    _living.add(queue)
    if not _is_registered:
        _is_registered = True
        atexit.register(_finish_all)


def _finish_all() -> None:
    for queue in list(_living):
        queue.drain()
        error = queue.take_error()
        if error is not None:
            _log.warning("an asynchronous callback failed after its run", exc_info=error)
