"""Runs handlers of a callback one after another, on a thread of their own, and those that are queued at exit, too."""

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

__all__ = ["HandlerCall", "HandlerQueue"]

_log = logging.getLogger(__name__)

IDLE_S = 2.0
"""After so long without an event its thread ends; the next event starts another."""


@dataclass(frozen=True, kw_only=True)
class HandlerCall:
    where: str
    """How errors name it: callback, event and step."""
    handler: Callable[..., Any]
    context: dict[str, Any]


class HandlerQueue:
    """Calls, one after another, on a thread that lives while there are any, and a little longer."""

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
        """Waits while there are too many. Nothing is taken while an error has not been."""
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
        """Returns when all is handled, or a call has failed."""
        with self._changed:
            self._wait_for(lambda: not self._calls and self._running is None)

    def finish(self) -> None:
        """As `drain`; no thread is left, but for one that hangs."""
        self.drain()
        with self._changed:
            thread, self._is_ending = self._thread, True
            self._changed.notify_all()
        if thread is not None and self._running is None:
            thread.join()
        self._is_ending = False

    def take_error(self) -> Exception | None:
        """What a call has raised; once."""
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
                    f"{where} has not ended for {self._timeout_s:g} s, on its thread beside training; what was queued "
                    "behind it is dropped (asynchronously(timeout_s=...))"
                )
                return
            self._changed.wait(left)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._calls and not self._is_ending:
                    self._changed.wait(IDLE_S)
                if not self._calls:
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
            del call, error  # or they would live as long as the thread is idle


def _error_of(call: HandlerCall) -> Exception | None:
    control = call.context.get("control")
    before = dict(vars(control)) if control is not None else {}
    try:
        answer = call.handler(**call.context)
        if answer is not None and answer is not control:
            raise _refused(call, "returns an answer")
        if control is not None and vars(control) != before:
            raise _refused(call, "changes control")
    except Exception as error:
        error.add_note(f"raised beside training, in {call.where}")
        return error
    return None


def _refused(call: HandlerCall, what: str) -> UsageError:
    event = call.where.partition(" ")[0].rpartition(".")[2]
    return UsageError(
        f"{call.where} {what}; beside training it would come at a step that nobody can tell: give it "
        f"asynchronously(..., in_place=({event!r},)), or do not make it asynchronous"
    )


# At the end of the process ------------------------------------------------------------------------------------------

_living: weakref.WeakSet[HandlerQueue] = weakref.WeakSet()
_is_registered = False


def _finish_at_exit(queue: HandlerQueue) -> None:
    """Their threads are daemons, which an interpreter that ends cuts off: what was told before is handled first."""
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
            _log.warning("a callback beside training failed after its run", exc_info=error)
