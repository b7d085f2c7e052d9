"""The descriptors of a link: of one way to the other side, or of several that are used in turn."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from .channel import ChannelClosed

__all__ = ["CAN_STRIPE", "Ends", "Stripes"]

CAN_STRIPE = hasattr(select, "epoll")
"""Whether a link of this process may have several ways."""

_TURN_BYTES = 128 * 1024
"""Bytes that go on one stripe at least, before it is the next one's turn: what is small goes on without a change."""


class Ends:
    """The descriptors of a link: of a socket, which is both, or of two pipes. Owns them; `close` is idempotent."""

    turns = False
    """Whether what is written goes on several ways in turn."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def fileno(self) -> int:
        """What can be read when something has come, or the link has ended."""
        return self.read_fd

    def write_fileno(self) -> int:
        """What to wait for where `write_fd` takes no more; see `Stripes`."""
        return self.write_fd

    def close(self) -> None:
        for fd in {self.read_fd, self.write_fd} - {-1}:
            os.close(fd)
        self.read_fd = self.write_fd = -1

    def finish(self, deadline: float) -> None:
        """Before `close`: see that what was written gets there, until `deadline` (monotonic) at most."""

    def close_in_child(self) -> None:
        """After a fork: the descriptors of this process, and nothing else that belongs to the link."""
        Ends.close(self)


class Stripes(Ends):
    """Several links that are used as one, each in its turn. Owns them.

    Each way through ssh has a window of its own (OpenSSH: 2 MiB may be on their way), so over a distance several
    bring several times as much. Who writes says with a TURN frame that it goes on with the next one. Who reads then
    does the same, so nothing need be put in order. If one ends, all have ended.

    `read_fd` and `write_fd` are those whose turn it is. What to wait for is an epoll of which they are a part, in both
    directions: that it can be *read* says that `write_fd` takes more.
    """

    def __init__(self, parts: Sequence[Ends]) -> None:
        self._parts = tuple(parts)
        self._rests = [b""] * len(self._parts)
        self._reading = self._writing = 0
        self._awaited: int | None = None
        """Which `_readable` looks at for more than its end."""
        self._blocked_fd = -1
        self._written = 0
        self._readable, self._writable = select.epoll(), select.epoll()
        for part in self._parts:
            self._readable.register(part.read_fd, select.EPOLLRDHUP)
        self.read_fd, self.write_fd = self._parts[0].read_fd, self._parts[0].write_fd
        self.await_input()

    def fileno(self) -> int:
        return -1 if self._readable.closed else self._readable.fileno()

    def write_fileno(self) -> int:
        return -1 if self._writable.closed else self._writable.fileno()

    # Going out ------------------------------------------------------------------------------------------------------

    def wrote(self, count: int) -> bool:
        """Count whole frames that were written. True: it is the next one's turn, which the other side must be told."""
        self._written += count
        return self.turns and self._written >= _TURN_BYTES

    def turn_writing(self) -> None:
        """The other side was told."""
        self._written = 0
        self._writing = (self._writing + 1) % len(self._parts)
        self.write_fd = self._parts[self._writing].write_fd

    def await_room(self) -> None:
        """`write_fd` takes no more: `write_fileno` shall tell when it does. Raises ChannelClosed."""
        if self._blocked_fd == self.write_fd:
            return
        try:
            if self._blocked_fd >= 0:
                self._writable.unregister(self._blocked_fd)
            self._writable.register(self.write_fd, select.EPOLLOUT)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error
        self._blocked_fd = self.write_fd

    # Coming in ------------------------------------------------------------------------------------------------------

    def turn_reading(self, rest: bytes) -> bytes:
        """The other side goes on with the next one. `rest`: what has come behind its TURN; returns what the next had
        brought before.
        """
        self._rests[self._reading] = rest
        self._reading = (self._reading + 1) % len(self._parts)
        self.read_fd = self._parts[self._reading].read_fd
        before, self._rests[self._reading] = self._rests[self._reading], b""
        return before

    def await_input(self) -> None:
        """From now on `fileno` can be read when `read_fd` can. Raises ChannelClosed."""
        if self._awaited == self._reading:
            return
        try:
            if self._awaited is not None:
                self._readable.modify(self._parts[self._awaited].read_fd, select.EPOLLRDHUP)
            self._readable.modify(self.read_fd, select.EPOLLIN | select.EPOLLRDHUP)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error
        self._awaited = self._reading

    def check(self) -> None:
        """Nothing is there to read. Raises ChannelClosed if one of them has ended: what it owes never comes."""
        try:
            ready = self._readable.poll(0)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error
        if any(events & ~select.EPOLLIN for _, events in ready):
            raise ChannelClosed("one of its channels has ended")

    # Its end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._close_descriptors()
        for part in self._parts:
            part.close()

    def finish(self, deadline: float) -> None:
        """By the one whose turn it is: the other side finds the end there, behind all the rest."""
        self._parts[self._writing].finish(deadline)

    def close_in_child(self) -> None:
        self._close_descriptors()
        for part in self._parts:
            part.close_in_child()

    def _close_descriptors(self) -> None:
        self.read_fd = self.write_fd = -1
        with contextlib.suppress(OSError):  # closed already
            self._readable.close()
            self._writable.close()
