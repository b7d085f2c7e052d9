"""Outlets: a bounded queue and a thread in front of every place that output for the user goes to.

A terminal can stall at any moment (Ctrl-S, `| less`, a log shipper that hangs). So can the user's functions and disks.
The engine must not wait for them. `put` never blocks; when the reader falls behind, the oldest items are dropped and
counted. A caller that needs an item to be written first can `wait` for it, and every wait has a timeout.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TextIO, TypeVar

from ..core.printable import printable_lines

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LIMIT_CHARACTERS = 16 << 20
"""Text that waits in an outlet at most. A burst of 100,000 lines fits; nobody reads more than that at once."""
_OVERHEAD = 200
"""Characters that each item counts besides its text, so that empty lines are bounded, too."""
_STALLED_S = 0.5
"""Seconds without progress after which callers stop waiting for a reader."""
_SLOW_S = 2.0
"""Seconds that a caller waits at most, even if the reader makes progress."""
_LAST_WORDS_S = 3.0
"""Seconds without progress after which `flush` gives up. A pool that closes tries longer than a call."""
_LONGEST_FLUSH_S = 30.0
_IDLE_S = 0.5
"""Seconds after which an idle thread ends; the next item starts another one."""
_PIECE = 1800
"""Bytes of one write. A terminal takes up to 2048 at once, and others, such as the console, may write between two
writes. A pipe that polls as writable takes them without blocking."""

_outlets: weakref.WeakSet[Outlet[Any]] = weakref.WeakSet()


class Outlet(Generic[T]):
    """Bounded queue with a thread that hands its items to a sink, in order. Thread-safe.

    The sink may block for any time. If it raises, the error is logged once, and the sink gets nothing more.

    Args:
        sink: called with the next items, at most `batch` at a time.
        size: return the characters of an item.
        dropped: make the item that reports a number of dropped ones; it also gets the oldest item that is left.
        label: name of the sink in reports of its errors.
        batch: items in one call of the sink at most.
        limit: characters that wait at most.
    """

    def __init__(
        self,
        sink: Callable[[list[T]], object],
        *,
        size: Callable[[T], int],
        dropped: Callable[[int, T], T],
        label: str,
        batch: int = 256,
        limit: int = _LIMIT_CHARACTERS,
    ) -> None:
        self._sink: Callable[[list[T]], object] | None = sink
        self._size = size
        self._dropped = dropped
        self._label = label
        self._batch = batch
        self._limit = limit
        self._forget()
        _outlets.add(self)

    def _forget(self) -> None:
        """Reset the queue. A forked child needs it: the thread, and the holder of the lock, stay in the parent."""
        self._condition = threading.Condition()
        self._items: deque[T] = deque()
        self._characters = 0
        self._missing = 0
        self._put = 0
        self._out = 0
        self._moved_at = time.monotonic()
        self._is_idle = False
        self._thread: threading.Thread | None = None

    def put(self, item: T) -> int:
        """Queue an item and return its number. Never blocks."""
        with self._condition:
            self._put += 1
            if self._sink is None:
                self._out = self._put
                return self._put
            self._items.append(item)
            self._characters += self._size(item) + _OVERHEAD
            while self._characters > self._limit and len(self._items) > 1:
                self._characters -= self._size(self._items.popleft()) + _OVERHEAD
                self._missing += 1
            if self._thread is None:
                self._moved_at = time.monotonic()
                self._start()
            elif self._is_idle:
                self._moved_at = time.monotonic()
                self._condition.notify_all()
            return self._put

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="skyward-outlet", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had; the next item tries again
            return
        self._thread = thread

    def wait(self, number: int) -> bool:
        """Wait until item `number` was written. Returns False if the reader has stalled or is slow."""
        return self._out >= number or self._wait(number, _STALLED_S, _SLOW_S, self._moved_at)

    def flush(self) -> bool:
        """Wait until everything was written, longer than `wait` does. Returns False if the reader has stalled."""
        return self._wait(self._put, _LAST_WORDS_S, _LONGEST_FLUSH_S, time.monotonic())

    def _wait(self, number: int, stalled_s: float, longest_s: float, moved_at: float) -> bool:
        if threading.current_thread() is self._thread:
            return False  # the sink itself waits, and would wait for itself
        began = time.monotonic()
        with self._condition:
            while self._out < number:
                if self._thread is None:
                    return False  # no thread could be started
                last = max(moved_at, self._moved_at)
                left_s = min(began + longest_s, last + stalled_s) - time.monotonic()
                if left_s <= 0:
                    return False
                self._condition.wait(left_s)
        return True

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while items := self._next():
            try:
                assert self._sink is not None
                self._sink(items)
            except BaseException as error:  # a function of the user's: SystemExit can come too
                self._fail(error)

    def _next(self) -> list[T]:
        """Count the last items as written, and return the next ones. An empty list ends the thread."""
        with self._condition:
            self._moved_at = time.monotonic()
            self._out = self._put - len(self._items)
            self._condition.notify_all()
            if not self._items:
                self._is_idle = True
                self._condition.wait_for(lambda: self._items, _IDLE_S)
                self._is_idle = False
                self._moved_at = time.monotonic()
            if not self._items:
                self._thread = None
                return []
            items = [self._items.popleft() for _ in range(min(self._batch, len(self._items)))]
            self._characters -= sum(map(self._size, items)) + _OVERHEAD * len(items)
            missing, self._missing = self._missing, 0
        return [self._dropped(missing, items[0]), *items] if missing else items

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            self._sink = None
            self._items.clear()
        _log.error("%s raised; it gets nothing more:", self._label, exc_info=error)

    def forget_in_child(self) -> None:
        self._forget()


# Text ----------------------------------------------------------------------------------------------------------------


def write_text(stream: TextIO | None, text: str) -> None:
    """Write to a stream that may stall, without holding its lock meanwhile.

    A blocking write holds the lock of the buffer of sys.stdout. The user's own `print` then waits for that lock, and
    Ctrl-C cannot interrupt it. So pipes and terminals are polled, and get small pieces.
    """
    try:
        if stream is None or (fd := _pollable(stream)) < 0:
            stream.write(text)  # type: ignore[union-attr]  # None: the AttributeError below
            stream.flush()  # type: ignore[union-attr]
            return
        for piece in _pieces(text):
            _wait_writable(fd)
            if not stream.line_buffering:
                stream.flush()  # a pipe or a file: earlier prints stay in front
            # `stream.write` was tried: before Python 3.12.4 it loses prints of other threads (gh-119506). It may also
            # come between a line that the user prints and its newline, since these are two writes.
            stream.buffer.write(piece.encode(stream.encoding, stream.errors or "strict"))
            stream.buffer.flush()
    except (OSError, ValueError, AttributeError):  # closed by the user; there is nowhere to say so
        return


def _pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces of whole lines; only longer lines are cut themselves."""
    size = _PIECE if text.isascii() else _PIECE // 4
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _pollable(stream: TextIO | None) -> int:
    """Return the descriptor of a plain file; -1 for other streams, such as those of notebooks and tests."""
    try:
        return stream.fileno() if isinstance(stream, io.TextIOWrapper) else -1
    except (OSError, ValueError):
        return -1


def _wait_writable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


def _write_notices(texts: list[str]) -> None:
    write_text(sys.stderr, "".join(texts))


notices = Outlet(
    _write_notices, size=len, dropped=lambda count, _: f"skyward: {count} messages were dropped here\n", label="stderr"
)
"""Messages of skyward to the user, on standard error."""


def notify(text: str) -> int:
    """Print a message for the user without waiting for the terminal. Returns its number in `notices`."""
    return notices.put(f"skyward: {printable_lines(text)}\n")


def _forget_all_in_child() -> None:
    for outlet in list(_outlets):
        outlet.forget_in_child()


def _flush_all() -> None:
    """Write everything at the end of the process: a pool may end with it, and the threads of its outlets, too."""
    for outlet in list(_outlets):
        outlet.flush()


atexit.register(_flush_all)
os.register_at_fork(after_in_child=_forget_all_in_child)
