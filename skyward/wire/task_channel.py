"""One end of a channel of messages between a task and its pool's program. Both ends are alike.

The links below deliver each frame once and in order, also across a reconnect (`stream`). A channel adds the rest:

- Messages of any length travel as MESSAGE frames of at most `PIECE_BYTES`.
- A sender has at most `WINDOW_BYTES` on the way that the other end has not taken. It holds back the rest: `send` waits.
- TAKEN acknowledges: the other end's program has received the messages up to a number of bytes.
- END comes behind the last message. The agent sends it for a task that cannot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Self

from ..errors import InternalError, UsageError
from .frames import INLINE_LIMIT, FrameKind

WINDOW_BYTES: Final = 1 << 20
PIECE_BYTES: Final = INLINE_LIMIT
MESSAGE_LIMIT: Final = 64 << 20
"""Longest message in bytes. The receiver holds one such message, and besides it no more than a window."""
NAME_LIMIT: Final = 200

_WHOLE, _PART, _DROP = 0, 1, 2
"""Lane of a MESSAGE frame: the end of a message, an earlier piece of it, or a message that its sender gave up."""

LOST_CLIENT = 1
"""Lane of an END_CHANNEL frame of the agent: the other end was lost, and another process goes on in its place."""

Tell = Callable[[FrameKind, bytes, int], None]
"""Sends a frame of the channel: kind, body and lane. It does not wait, and drops the frame if nobody is there."""


def nothing() -> None:
    """Do nothing."""


class TaskChannel:
    """Messages between a task and its pool's program, each delivered once and in order. Thread-safe.

    `sky.channel(name)` returns the task's end and `pool.channel(name)` the program's. A link that breaks only delays
    the messages. The channel ends when one side closes it, and with its call. Messages that were sent before the end
    can still be received. Iterating yields messages until the end.

    Attributes:
        name: Name that the task chose.
        node: Index of the task's node.
        rank: The task's rank in a gang; None for a plain call.

    Example:
        @sky.compute
        def train():
            with sky.channel("progress") as channel:
                for step in range(3):
                    channel.send(b"step %d" % step)

        future = train() > pool
        for message in pool.channel("progress", timeout_s=60):
            print(message)
    """

    def __init__(
        self, name: str, tell: Tell, *, node: int, rank: int | None = None, before_wait: Callable[[], None] = nothing
    ) -> None:
        self.name, self.node, self.rank = name, node, rank
        self._tell = tell
        self._before_wait = before_wait
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        """Held during a message, so that the pieces of two messages do not mix."""
        self._end = ""
        """Why nothing is sent any more; empty while the channel is open."""
        self._is_over = False
        """Whether the other end has sent its last message."""
        self._sent = self._acknowledged = 0
        self._messages: deque[tuple[bytes, int]] = deque()
        """Messages with the bytes of their last piece, which count as taken when the message is."""
        self._pieces: list[bytes] = []
        self._early = 0
        """Bytes in `_pieces` that are not acknowledged yet."""
        self._taken = self._reported = 0

    def __repr__(self) -> str:
        place = f"node {self.node}" + ("" if self.rank is None else f", rank {self.rank}")
        return f"<TaskChannel {self.name!r} of {place} {self._end or 'open'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                message = self.receive()
            except EOFError:
                return
            yield message

    # For programs and tasks -------------------------------------------------------------------------------------------

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        """Send a message. Wait only while more than a MiB is on the way that the other end has not received.

        Args:
            message: At most 64 MiB.
            timeout_s: Longest wait in seconds; None: until there is room, or the channel ends.

        Raises:
            TimeoutError: There was no room in time. Nothing of the message is delivered.
            BrokenPipeError: The channel has ended.
            UsageError: The message is too long.
        """
        if len(message) > MESSAGE_LIMIT:
            raise UsageError(
                f"message=<{len(message)} bytes>: exceeds the limit of {MESSAGE_LIMIT}; split it into several messages"
            )
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._sending.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise TimeoutError(self._full(timeout_s))
        try:
            self._send_pieces(memoryview(message), deadline, timeout_s)
        finally:
            self._sending.release()

    def _send_pieces(self, data: memoryview, deadline: float | None, timeout_s: float | None) -> None:
        at = 0
        while True:
            piece = data[at : at + PIECE_BYTES]
            # A message that fits the window starts only when all of it does, so that few are given up half-way.
            needed = min(len(data), WINDOW_BYTES) if at == 0 else len(piece)
            try:
                self._reserve(needed, len(piece), deadline, timeout_s)
            except BaseException:  # a signal handler of the user's may raise too
                if at:
                    self._tell(FrameKind.MESSAGE, b"", _DROP)
                raise
            at += len(piece)
            is_last = at >= len(data)
            self._tell(FrameKind.MESSAGE, bytes(piece), _WHOLE if is_last else _PART)
            if is_last:
                return

    def _reserve(self, needed: int, size: int, deadline: float | None, timeout_s: float | None) -> None:
        def has_room() -> bool:
            return bool(self._end) or self._sent - self._acknowledged + needed <= WINDOW_BYTES

        with self._changed:
            if not has_room() and not self._wait(has_room, deadline):
                raise TimeoutError(self._full(timeout_s))
            if self._end:
                raise BrokenPipeError(f"channel={self.name!r}: nothing can be sent, because {self._end}; open another")
            self._sent += size

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Return the next message.

        Args:
            timeout_s: Longest wait in seconds; None: until there is a message, or the channel ends.

        Raises:
            TimeoutError: No message came in time.
            EOFError: The channel has ended, and all its messages were received.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if not self._messages and not self._is_over:
                self._wait(lambda: bool(self._messages) or self._is_over, deadline)
            if not self._messages:
                if self._is_over:
                    raise EOFError(f"channel={self.name!r}: has no more messages, because {self._end}")
                raise TimeoutError(
                    f"channel={self.name!r}: no message came within {timeout_s:g} s; check its sender, or raise "
                    "timeout_s"
                )
            message, size = self._messages.popleft()
            self._count_taken(size)
            report = self._due_report()
        self._report(report)
        return message

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the other end has received all messages. Return whether it has.

        Args:
            timeout_s: Longest wait in seconds; None: until it has, or the channel ends.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if self._acknowledged < self._sent and not self._end:
                self._wait(lambda: self._acknowledged >= self._sent or bool(self._end), deadline)
            return self._acknowledged >= self._sent

    def close(self) -> None:
        """End the channel for both sides. The other end still receives what was sent. Idempotent."""
        if self._finish("this side closed it"):
            with self._sending:  # behind the last piece
                self._tell(FrameKind.END_CHANNEL, b"", 0)

    @property
    def is_open(self) -> bool:
        """Return whether messages can be sent."""
        return not self._end

    # For the frames ---------------------------------------------------------------------------------------------------

    def on_frame(self, kind: int, body: bytes, lane: int) -> None:
        """Take a frame of the other end. Only the thread that reads the link calls this."""
        if kind == FrameKind.MESSAGE:
            self._on_piece(body, lane)
        elif kind == FrameKind.TAKEN:
            with self._changed:
                self._acknowledged = int.from_bytes(body, "little")
                self._changed.notify_all()
        elif kind == FrameKind.END_CHANNEL:
            self.end("the other side closed it, or its call ended")

    def end(self, why: str) -> None:
        """End the channel because its other end is gone."""
        self._finish(why)

    def _finish(self, why: str) -> bool:
        with self._changed:
            is_first = not self._end
            self._end = self._end or why
            self._is_over = True
            self._changed.notify_all()
        return is_first

    def _on_piece(self, body: bytes, lane: int) -> None:
        with self._changed:
            if self._is_over:
                return
            if lane == _WHOLE:
                self._messages.append((b"".join((*self._pieces, body)), self._early + len(body)))
                self._pieces, self._early = [], 0
                self._changed.notify_all()
                return
            if lane == _PART:
                self._pieces.append(body)
                self._early += len(body)
            else:
                self._taken += self._early
                self._pieces, self._early = [], 0
            self._count_taken(0)
            report = self._due_report()
        self._report(report)

    def _count_taken(self, size: int) -> None:
        """Count bytes as taken. Without a waiting message, this includes the pieces of one that is not complete.

        Otherwise a message longer than the window would never arrive whole.
        """
        self._taken += size
        if not self._messages:
            self._taken += self._early
            self._early = 0

    def _due_report(self) -> int | None:
        if self._taken == self._reported or (self._messages and self._taken - self._reported < WINDOW_BYTES // 4):
            return None
        self._reported = self._taken
        return self._taken

    def _report(self, taken: int | None) -> None:
        if taken is not None:  # two threads may swap their reports, and the larger one counts
            self._tell(FrameKind.TAKEN, taken.to_bytes(8, "little"), 0)

    def _wait(self, is_over: Callable[[], bool], deadline: float | None) -> bool:
        self._before_wait()
        return self._changed.wait_for(is_over, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _full(self, timeout_s: float | None) -> str:
        return f"channel={self.name!r}: the other side took nothing within {timeout_s or 0:g} s; let it receive"


def pieces_of(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield lane and body of each MESSAGE frame of a message that needs no window."""
    last = max(0, len(message) - 1) // PIECE_BYTES * PIECE_BYTES
    for at in range(0, last, PIECE_BYTES):
        yield _PART, message[at : at + PIECE_BYTES]
    yield _WHOLE, message[last:]


class MessagePieces:
    """Pieces of a message of at most `limit` bytes until it is whole."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, body: bytes, lane: int) -> bytes | None:
        """Add a piece. Return the message if this was its last piece.

        Raises:
            InternalError: The message is too long.
        """
        if lane == _WHOLE and not self._parts:
            return body
        self._parts.append(body)
        self._size += len(body)
        if self._size > self._limit + PIECE_BYTES:
            raise InternalError(f"channel: a message exceeds the limit of {self._limit} bytes; report this bug")
        if lane != _WHOLE:
            return None
        message = b"".join(self._parts)
        self._parts, self._size = [], 0
        return message


RESERVED: Final = "skyward."
"""First characters of the names of services. A program that lacks the service ends the channel at once."""

services: dict[str, Callable[[TaskChannel], None]] = {}
"""Functions of this process by name of a service, which begins with `RESERVED`. Each channel of that name, or of that
name with a slash and more behind it, is passed to its function in a thread. The entry points `skyward.services` of
installed packages add to them.
"""

losses: dict[str, Callable[[str], Exception | None]] = {}
"""Functions of this process by name of a service. Each is asked with the `job_id` of a pool that has ended, and returns
what its service has lost of it, once; None for nothing."""


def loss_of(pool: str) -> Exception | None:
    """Return what a service has lost of a pool that has ended, which the pool raises; None for nothing."""
    return next((loss for ask in losses.values() if (loss := ask(pool)) is not None), None)


def check_name(name: str) -> str:
    """Return the name of a channel.

    Raises:
        UsageError: It is not one.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LIMIT:
        raise UsageError(f"name={name!r:.60}: is not the name of a channel; pass 1 to {NAME_LIMIT} characters")
    return name
