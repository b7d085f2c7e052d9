"""Attribution of output to tasks: reads a slot's pipes and splits them at the markers; see slot.stdio.

Bytes before a task's marker belong to that task. Bytes behind the last marker come from a task that has not ended, and
the shared page names it. If the page names the same task before and after the pipe was read empty, the bytes are that
task's. If not, the task has ended in between, and its marker is in the pipe: read again.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator

_READ_SIZE = 64 * 1024
_HEAD = b"\x1e\x02"


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
        self._start = _HEAD + token
        self._marker_size = len(self._start) + 8
        self._current = current
        self._drained = drained
        self._reading = reading
        self._held = b""
        self.is_closed = False

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield (task, text) for everything in the pipe, with task 0 between tasks. Never waits."""
        self._reading(True)
        try:
            for task, text in self._pieces():
                # Count text only: a marker must not count as output of the next task.
                self._drained(len(text))
                yield task, text
        finally:
            self._reading(False)

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        while True:
            before = self._current()
            yield from self._split(self._read_all())
            after = self._current()
            if before == after or not self._held:
                break
        if self._held and (self.is_closed or not self._ends_within_marker()):
            text, self._held = self._held, b""
            yield after, text

    def _ends_within_marker(self) -> bool:
        """Return whether the last bytes may begin a marker whose rest is still in the pipe."""
        at = self._held.find(_HEAD[:1], max(0, len(self._held) - self._marker_size + 1))
        while at >= 0:
            if self._start.startswith(self._held[at : at + len(self._start)]):
                return True
            at = self._held.find(_HEAD[:1], at + 1)
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

    def _split(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        data = self._held + data
        while True:
            at = data.find(self._start)
            if at < 0 or len(data) - at < self._marker_size:
                break
            (task,) = struct.unpack_from("<Q", data, at + len(self._start))
            if at:
                yield task, data[:at]
            data = data[at + self._marker_size :]
        self._held = data

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
        self._bytes += len(text)
        while self._bytes > self._limit and len(self._items) > 1:
            _, _, oldest = self._items.popleft()
            self._bytes -= len(oldest)
            self._dropped += oldest.count(b"\n") or 1

    def take(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield everything in order, preceded by a note about dropped lines."""
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            note = f"[skyward: {dropped} lines of output were dropped here: they came faster than they were read]\n"
            yield self._items[0][0] if self._items else 0, 1, note.encode()
        while self._items:
            task, stream, text = self._items.popleft()
            self._bytes -= len(text)
            for start in range(0, len(text), _READ_SIZE):
                yield task, stream, text[start : start + _READ_SIZE]

    def drop(self) -> None:
        """Drop everything, and count the lines."""
        self._dropped += sum(text.count(b"\n") or 1 for _, _, text in self._items)
        self._items.clear()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._items) or self._dropped > 0
