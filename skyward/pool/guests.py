"""Transfers of files and forwarded ports: they use the machines of a pool beside its engine, and end with the pool."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from ..errors import SkywardError


class Guest(Protocol):
    """Activity that somebody else may end at any time."""

    def end(self, reason: SkywardError) -> None:
        """End it; whoever waits for it gets the reason. Idempotent, and does not block for long."""
        ...


class Guests:
    """Open guests of one pool. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Guest] = []

    @property
    def are_there(self) -> bool:
        """Return whether any guest is open, so that the machines are in use."""
        return bool(self._open)

    @contextlib.contextmanager
    def counted(self, guest: Guest) -> Iterator[None]:
        """Let a guest end with the pool while the block runs."""
        self.add(guest)
        try:
            yield
        finally:
            self.remove(guest)

    def add(self, guest: Guest) -> None:
        with self._lock:
            self._open.append(guest)

    def remove(self, guest: Guest) -> None:
        with self._lock:
            self._open = [other for other in self._open if other is not guest]

    def end_all(self, reason: SkywardError) -> None:
        """End all guests, because the pool ends for that reason."""
        with self._lock:
            ending, self._open = self._open, []
        for guest in ending:
            guest.end(reason)
