"""Attribution of output to tasks: reads a slot's pipes and splits them at the marks; see slot.stdio.

A mark is the end of a task's output, or a piece of a display, which stands between the lines of its task. Bytes before
a mark belong to its task. Bytes behind the last mark come from a task that has not ended, and the shared page names it.
If the page names the same task before and after the pipe was read empty, the bytes are that task's. If not, the task
has ended in between, and its mark is in the pipe: read again.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...wire.displays import is_first
from ..slot.stdio import DISPLAY, DISPLAY_HEAD, MARKER_SIZE

_READ_SIZE = 64 * 1024
_FIRST = b"\x1e"

DISPLAYS = 2
"""Number of the stream of displays, beside 0 for stdout and 1 for stderr."""
_DISPLAY_WEIGHT = 1 / 16
"""Share of their bytes that displays count: one figure must not displace thousands of lines."""


def weight(stream: int, text: bytes) -> int:
    """Return the bytes that a piece of output counts within the limits."""
    return int(len(text) * _DISPLAY_WEIGHT) if stream == DISPLAYS else len(text)


class Output(NamedTuple):
    """A piece of a task's output. `task` is 0 between tasks."""

    task: int
    data: bytes
    is_display: bool = False


class OutputReader:
    """Reader of one pipe of one process. `current` returns the task that the shared page names."""

    def __init__(
        self,
        fd: int,
        token: bytes,
        current: Callable[[], int],
        drained: Callable[[int], None],
        reading: Callable[[bool], None] = lambda is_reading: None,
    ) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._start = _FIRST + token
        self._current = current
        self._drained = drained
        self._reading = reading
        self._held = b""
        self.is_closed = False

    def read(self) -> Iterator[Output]:
        """Yield everything in the pipe. Never waits."""
        self._reading(True)
        try:
            for output in self._pieces():
                # Do not count marks of ends, which would then be output of the next task.
                self._drained(len(output.data))
                yield output
        finally:
            self._reading(False)

    def _pieces(self) -> Iterator[Output]:
        while True:
            before = self._current()
            yield from self._split(self._read_all())
            after = self._current()
            if before == after or not self._held:
                break
        if self._held and (self.is_closed or not self._ends_within_mark()):
            text, self._held = self._held, b""
            yield Output(after, text)

    def _ends_within_mark(self) -> bool:
        """Return whether the last bytes may begin a mark whose rest is still in the pipe."""
        if self._start in self._held:
            return True
        at = self._held.find(_FIRST, max(0, len(self._held) - len(self._start) + 1))
        while at >= 0:
            if self._start.startswith(self._held[at:]):
                return True
            at = self._held.find(_FIRST, at + 1)
        return False

    def _read_all(self) -> bytes:
        pieces: list[bytes] = []
        try:
            while len(pieces) < 64:  # bounded, because a flood must not starve the loop; the rest is read next time
                piece = os.read(self.fd, _READ_SIZE)
                if not piece:
                    self.is_closed = True
                    break
                pieces.append(piece)
        except BlockingIOError:  # the pipe is empty for now
            pass
        return b"".join(pieces)

    def _split(self, data: bytes) -> Iterator[Output]:
        """Split at the marks, and hold what is behind the last whole one."""
        data = self._held + data
        at = 0
        while (mark := data.find(self._start, at)) >= 0:
            body = mark + MARKER_SIZE
            end = body
            kind = mark + len(self._start)
            if data[kind : kind + 1] == DISPLAY:
                body = mark + DISPLAY_HEAD.size
                end = body + int.from_bytes(data[body - 2 : body], "little")
            if len(data) < end:
                break
            task = int.from_bytes(data[mark + MARKER_SIZE - 8 : mark + MARKER_SIZE], "little")
            if mark > at:
                yield Output(task, data[at:mark])
            if end > body:
                yield Output(task, data[body:end], is_display=True)
            at = end
        self._held = data[at:]

    def close(self) -> None:
        with contextlib.suppress(OSError):  # already closed
            os.close(self.fd)
        self.is_closed = True


class LogBuffer:
    """Output on its way to the client, at most `limit_bytes`. When full, it drops the oldest and counts the lines."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._items: deque[tuple[int, int, bytes]] = deque()
        self._bytes = 0
        self._dropped = 0

    def add(self, task: int, stream: int, text: bytes) -> None:
        self._items.append((task, stream, text))
        self._bytes += weight(stream, text)
        while self._bytes > self._limit and len(self._items) > 1:
            _, source, oldest = self._items.popleft()
            self._bytes -= weight(source, oldest)
            self._dropped += _lines_in(source, oldest)

    def take(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield everything in order, preceded by a note about dropped lines."""
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            note = f"[skyward: {dropped} lines of output were dropped here: they came faster than they were read]\n"
            yield self._items[0][0] if self._items else 0, 1, note.encode()
        while self._items:
            task, stream, text = self._items.popleft()
            self._bytes -= weight(stream, text)
            for start in range(0, len(text), _READ_SIZE):
                yield task, stream, text[start : start + _READ_SIZE]

    def trim(self, size: int) -> None:
        """Drop the oldest output until `size` bytes are left, and count the lines. Keep whole lines."""
        while self._bytes > size:
            task, stream, text = self._items.popleft()
            self._bytes -= weight(stream, text)
            left = b""
            if stream != DISPLAYS and self._bytes < size:
                _, _, left = text[self._bytes - size - 1 :].partition(b"\n")
            self._dropped += _lines_in(stream, text[: len(text) - len(left)])
            if left:
                self._items.appendleft((task, stream, left))
                self._bytes += len(left)

    def __bool__(self) -> bool:
        return bool(self._items) or self._dropped > 0


def _lines_in(stream: int, text: bytes) -> int:
    return is_first(text) if stream == DISPLAYS else text.count(b"\n") or 1
