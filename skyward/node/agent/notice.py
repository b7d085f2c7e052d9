"""The provider's announcement that it takes this machine back: looked for, and told as soon as somebody listens."""

from __future__ import annotations

from collections.abc import Callable

from .loop import EventLoop, Timer

__all__ = ["NoticeWatch"]

_LOOK_S = 1.0
_LONGEST = 4096


class NoticeWatch:
    """Looks for a file, once a second; in the agent's one thread. Without a path it does nothing.

    `tell` gets what the file holds, and returns whether there was somebody to hear it.
    """

    def __init__(self, loop: EventLoop, path: str, tell: Callable[[bytes], bool]) -> None:
        self._loop = loop
        self._path = path
        self._tell = tell
        self._timer: Timer | None = None
        self.again()

    def again(self) -> None:
        """There is somebody new to be told."""
        self.close()
        if self._path:
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def close(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        try:
            with open(self._path, "rb") as file:
                said = file.read(_LONGEST).strip()
        except OSError:  # it is not there
            self.again()
            return
        if self._tell(said):
            self.close()
        else:
            self.again()
