"""Lines of output that wait for the next client of a detached pool: the newest ones, and the number of the others."""

from __future__ import annotations

import threading
from collections import deque

_LIMIT_BYTES = 8 << 20


class KeptOutput:
    """Bounded line of messages, each with its call. Thread-safe."""

    def __init__(self, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._lines: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._dropped = 0
        self._lock = threading.Lock()

    def put(self, call: int, message: bytes) -> None:
        """Add a message, and drop the oldest ones if there is no room for all."""
        with self._lock:
            self._lines.append((call, message))
            self._size += len(message)
            while self._size > self._limit:
                _, oldest = self._lines.popleft()
                self._size -= len(oldest)
                self._dropped += 1

    def put_before(self, lines: list[tuple[int, bytes]]) -> None:
        """Add messages that are older than all others."""
        with self._lock:
            if self._dropped:  # newer ones had no room
                self._dropped += len(lines)
                return
            self._lines.extendleft(reversed(lines))
            self._size += sum(len(message) for _, message in lines)

    @property
    def is_empty(self) -> bool:
        return not self._lines and not self._dropped

    def take(self) -> tuple[list[tuple[int, bytes]], int]:
        """Return all messages, oldest first, and how many were dropped before them."""
        with self._lock:
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._size = self._dropped = 0
        return lines, dropped
