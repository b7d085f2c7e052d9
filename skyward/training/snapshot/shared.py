"""Reference-counted objects that several threads share. Imports no framework."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Shared(ABC):
    """Copy with a reference count, which any thread may retain and release.

    It begins with one reference, the taker's; a `with` block releases it.
    """

    def __init__(self) -> None:
        self._references = 1
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def retain(self) -> Self:
        """Add a reader; raise RuntimeError if the last one has released it."""
        with self._lock:
            if self._references == 0:
                raise RuntimeError("snapshot: was released; retain it before its last reader releases it")
            self._references += 1
        return self

    def release(self) -> None:
        """Remove a reader; raise RuntimeError if there is none."""
        with self._lock:
            if self._references == 0:
                raise RuntimeError("snapshot: was released more often than retained; release once per retain")
            self._references -= 1
            is_last = self._references == 0
        if is_last:
            self._let_go()

    @abstractmethod
    def _let_go(self) -> None:
        """Return the buffers. Called once, by the last reader's thread."""
