"""What several readers share until the last of them has let it go. No framework is imported here."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

__all__ = ["Shared"]


class Shared(ABC):
    """A copy that any thread may retain and release. Made with one reference, the taker's; a `with` releases it."""

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
        """One more reader. Raises: RuntimeError when the last one has released it."""
        with self._lock:
            if self._references == 0:
                raise RuntimeError("the snapshot was released; retain it before its last reader lets it go")
            self._references += 1
        return self

    def release(self) -> None:
        """One reader less. Raises: RuntimeError when there is none."""
        with self._lock:
            if self._references == 0:
                raise RuntimeError("the snapshot was released more often than retained")
            self._references -= 1
            is_last = self._references == 0
        if is_last:
            self._let_go()

    @abstractmethod
    def _let_go(self) -> None:
        """Gives the buffers back. Called once, by the last reader's thread."""
