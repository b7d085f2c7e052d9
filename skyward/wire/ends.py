"""Descriptors of a link: one path to the peer, or several that are used in turn (stripes)."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence

from .channel import ChannelClosed

CAN_STRIPE = hasattr(select, "epoll")
"""Whether links of this process can have several stripes."""

_TURN_BYTES = 128 * 1024
"""Least number of bytes that one stripe carries before a switch, so that small traffic causes none."""


class Ends:
    """Descriptors of a link: one socket for both directions, or two pipes. Owns them; `close` is idempotent."""

    turns = False
    """Whether sending switches between stripes."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on input and at the end of the link."""
        return self.read_fd

    def write_fileno(self) -> int:
        """Return the descriptor to poll while `write_fd` takes no more; see `Stripes`."""
        return self.write_fd

    def read_exactly(self, count: int, deadline: float) -> bytes:
        """Read this many bytes of a greeting. Raises TimeoutError at the deadline (monotonic), EOFError at the end."""
        poll = select.poll()
        poll.register(self.read_fd, select.POLLIN)
        data = b""
        while len(data) < count:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise TimeoutError("timed out")  # words: ok, who greets says of whom
            piece = os.read(self.read_fd, count - len(data))
            if not piece:
                raise EOFError("stream ended")
            data += piece
        return data

    def write_exactly(self, data: bytes, deadline: float) -> None:
        """Write all of a greeting. Raises TimeoutError at the deadline (monotonic), OSError if the peer is gone."""
        poll = select.poll()
        poll.register(self.write_fd, select.POLLOUT)
        left = memoryview(data)
        while left:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise TimeoutError("timed out")  # words: ok, who greets says of whom
            with contextlib.suppress(BlockingIOError):  # there is room for less than a pipe takes at once
                left = left[os.write(self.write_fd, left) :]

    def close(self) -> None:
        for fd in {self.read_fd, self.write_fd} - {-1}:
            os.close(fd)
        self.read_fd = self.write_fd = -1

    def finish(self, deadline: float) -> None:
        """Wait, before `close`, until written bytes are delivered, or `deadline` (monotonic) has passed."""

    def close_in_child(self) -> None:
        """Close this process's descriptors after a fork, and nothing else that belongs to the link."""
        Ends.close(self)


class Stripes(Ends):
    """Several links (stripes) used as one, each in its turn. Owns them.

    Each ssh channel has its own flow-control window (OpenSSH allows 2 MiB in flight), so over a long distance several
    channels multiply the throughput. The writer announces with a TURN frame that it continues on the next stripe, and
    the reader follows. So frames arrive in order without sequence numbers or reassembly. The end of one stripe is the
    end of the whole link.

    `read_fd` and `write_fd` belong to the stripes whose turn it is. `fileno` and `write_fileno` are epolls, so they
    stay the same when the turn changes. The output's epoll becomes *readable* when `write_fd` takes more.
    """

    def __init__(self, parts: Sequence[Ends]) -> None:
        self._parts = tuple(parts)
        self._rests = [b""] * len(self._parts)
        self._reading = self._writing = 0
        self._awaited: int | None = None
        """Index of the stripe that `_readable` watches for input. It watches all the others for their end only."""
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
        """Count written bytes. Return whether a switch is due, which the writer must announce before it makes it."""
        self._written += count
        return self.turns and self._written >= _TURN_BYTES

    def turn_writing(self) -> None:
        """Switch to the next stripe, once the TURN frame is written."""
        self._written = 0
        self._writing = (self._writing + 1) % len(self._parts)
        self.write_fd = self._parts[self._writing].write_fd

    def await_room(self) -> None:
        """Make `write_fileno` signal when `write_fd` takes more.

        Raises:
            ChannelClosed: Another thread has closed the link.
        """
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
        """Follow the peer to the next stripe.

        Args:
            rest: Bytes read behind the TURN frame. They open this stripe's next turn and are kept until then.

        Returns:
            The bytes that the next stripe brought early, behind its own last TURN.
        """
        self._rests[self._reading] = rest
        self._reading = (self._reading + 1) % len(self._parts)
        self.read_fd = self._parts[self._reading].read_fd
        before, self._rests[self._reading] = self._rests[self._reading], b""
        return before

    def await_input(self) -> None:
        """Make `fileno` signal when `read_fd` has input.

        Input of other stripes must not wake the reader: it could not read it before their turn and would spin.

        Raises:
            ChannelClosed: The link is closed.
        """
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
        """Look for dead stripes when there is nothing to read.

        Raises:
            ChannelClosed: A stripe has ended, so its bytes will never come.
        """
        try:
            ready = self._readable.poll(0)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error
        if any(events & ~select.EPOLLIN for _, events in ready):
            raise ChannelClosed("one channel of the link has ended")

    # Its end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._close_descriptors()
        for part in self._parts:
            part.close()

    def finish(self, deadline: float) -> None:
        """Finish the stripe whose turn it is. The peer reads that one last, behind everything else."""
        self._parts[self._writing].finish(deadline)

    def close_in_child(self) -> None:
        self._close_descriptors()
        for part in self._parts:
            part.close_in_child()

    def _close_descriptors(self) -> None:
        self.read_fd = self.write_fd = -1
        with contextlib.suppress(OSError):  # already closed
            self._readable.close()
            self._writable.close()
