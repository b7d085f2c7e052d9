"""Preemption notices: watches for the provider's announcement, and reports it once a client listens."""

from __future__ import annotations

from collections.abc import Callable

from .loop import EventLoop, Timer

_LOOK_S = 1.0
_LONGEST = 4096


class NoticeWatch:
    """Checks for a file once a second, in the agent's one thread. Does nothing without a path.

    `tell` receives the file's content, and returns whether a client was there to receive it.
    """

    def __init__(self, loop: EventLoop, path: str, tell: Callable[[bytes], bool]) -> None:
        self._loop = loop
        self._path = path
        self._tell = tell
        self._timer: Timer | None = None
        self.again()

    def again(self) -> None:
        """Report the notice again, because a new client has connected."""
        self.close()
        if self._path:
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def close(self) -> None:
        """Stop checking. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        try:
            with open(self._path, "rb") as file:
                notice = file.read(_LONGEST).strip()
        except OSError:  # no file, so no notice
            self.again()
            return
        if self._tell(notice):
            self.close()
        else:
            self.again()
