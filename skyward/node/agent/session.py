"""One connection to the agent, of the client or the keeper, over the agent's socket or a passed stream."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable

from ...errors import InternalError
from ...wire.channel import BLOBS, CONTROL, RESULTS, Channel, ChannelClosed
from ...wire.ends import Ends
from ...wire.frames import HAS_FD, IN_ORDER, QUIET, Frame, FrameKind, pack
from ...wire.stream import MAGIC, StreamChannel
from .complaints import complain
from .loop import EventLoop
from .output import DISPLAYS, LogBuffer, weight

_PIPE_SIZE = 1 << 20
_MESSAGES = (FrameKind.CHANNEL, FrameKind.MESSAGE, FrameKind.END_CHANNEL)
_LAST_WORDS = 8 << 10
"""Bytes of output that go ahead of each value, even to a peer that does not read."""
_FINAL = (FrameKind.RESULT, FrameKind.ERROR, FrameKind.LOST, FrameKind.UNCALL, FrameKind.FETCHED)


class _PassedEnds(Ends):
    """Descriptors that a stub has passed. Closing them closes the stub's own connection, and the stub exits."""

    def __init__(self, read_fd: int, write_fd: int, stub: Session) -> None:
        super().__init__(read_fd, write_fd)
        self.stub = stub
        for fd in (read_fd, write_fd):
            with contextlib.suppress(OSError):  # not a pipe, or the user's limit for pipe buffers is reached
                fcntl.fcntl(fd, getattr(fcntl, "F_SETPIPE_SZ", 1031), _PIPE_SIZE)

    def close(self) -> None:
        super().close()
        self.stub.close()


class Session:
    """Frames in through `on_frame`, frames out by priority, with output bounded by `log_limit_bytes`.

    A peer that does not read delays only itself. Its results wait, of which there are never more than tasks; its output
    is dropped, oldest first. A session with a `token` outlives its link: it keeps unsent frames until `take_over`
    gives it another link.
    """

    def __init__(
        self,
        loop: EventLoop,
        channel: Channel | StreamChannel,
        log_limit_bytes: int,
        on_frame: Callable[[Session, Frame], None],
        on_close: Callable[[Session], None],
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._on_frame = on_frame
        self._on_close = on_close
        self._log_limit_bytes = log_limit_bytes
        self._logs = LogBuffer(log_limit_bytes)
        self._pings = 0
        self._waiting_logs = 0
        """Bytes of output queued since the channel was last empty."""
        self._is_blocked = False
        self._bulky: set[int] = set()
        """Tasks that have sent a blob: their next frames must stay behind it."""
        self._passed: list[int] = []
        """Descriptors from a stub, until there are two."""
        self.is_closed = False
        self.role = ""
        self.token = ""
        self.link = 0
        """Number of the client's link that carries this session."""
        self._stripes: dict[int, Ends] = {}
        """Further channels of the link, until all have arrived."""
        loop.watch(channel, self._read)

    @property
    def passes_fds(self) -> bool:
        return self._channel.passes_fds

    @property
    def held_bytes(self) -> int:
        """Bytes of sent blobs that are kept until acknowledged; 0 if descriptors are passed instead."""
        return self._channel.held_bytes if isinstance(self._channel, StreamChannel) else 0

    @property
    def received(self) -> int:
        """Count of received frames; 0 on channels that do not count them."""
        return self._channel.received if isinstance(self._channel, StreamChannel) else 0

    @property
    def is_attached(self) -> bool:
        """Return whether the session has a link that may break."""
        return isinstance(self._channel, StreamChannel) and self._channel.is_attached

    # Links ----------------------------------------------------------------------------------------------------------

    def on_attach(self, frame: Frame) -> None:
        """Take a descriptor from a stub. The second one opens a new session on both."""
        self._passed.append(frame.fd)
        if len(self._passed) < 2:
            return
        (read_fd, write_fd), self._passed = self._passed, []
        channel = StreamChannel(checks_blobs=True)
        try:
            channel.attach(_PassedEnds(read_fd, write_fd, self), 0)
            session = Session(self._loop, channel, self._log_limit_bytes, self._on_frame, self._on_close)
        except OSError as error:
            complain(None, f"agent refused a channel: {error}")
            channel.close()
            self.close()
            return
        # When the stub ends, so has its stream. But frames may still be in the pipe: read these first.
        self._on_close = lambda _: session.drain()
        channel.greet(MAGIC)
        session.flush()

    def greet(self, kind: int, body: bytes) -> None:
        """Answer HELLO, ahead of all other frames."""
        if isinstance(self._channel, StreamChannel):
            self._channel.greet(pack(kind, body=body))
            self.flush()
        else:
            self.send(kind, body=body)

    def take_over(self, other: Session, peer_received: int) -> None:
        """Continue on the link of another session, and close that session."""
        assert isinstance(self._channel, StreamChannel)
        assert isinstance(other._channel, StreamChannel)
        self._detach()
        self._channel.attach(self._ends_of(other), peer_received)
        self._loop.watch(self._channel, self._read)

    def _ends_of(self, other: Session) -> Ends:
        """Take the link of another session, and close that session."""
        assert isinstance(other._channel, StreamChannel)
        other._unwatch()
        other.is_closed = True
        ends = other._channel.release()
        assert isinstance(ends, _PassedEnds)
        ends.stub._on_close = lambda _: self.drain()  # frames in the pipe belong to this session now
        return ends

    def widen(self, other: Session, stripe: int, stripes: int) -> None:
        """Add another session's link as a further channel of this one; all are used once the last has arrived."""
        assert isinstance(self._channel, StreamChannel)
        self._stripes[stripe] = self._ends_of(other)
        if len(self._stripes) < stripes - 1:
            return
        more, self._stripes = [ends for _, ends in sorted(self._stripes.items())], {}
        self._unwatch()
        try:
            self._channel.widen(more, turns=False)
        except OSError as error:  # the client counts on all channels, so drop the link: it makes a new one
            complain(None, f"agent could not widen a link: {error}")
            for ends in more:
                ends.close()
            self._channel.detach()
            return
        self._loop.watch(self._channel, self._read)
        self.flush()

    def _detach(self) -> None:
        if isinstance(self._channel, StreamChannel) and self._channel.is_attached:
            self._unwatch()
            self._channel.detach()
        self._drop_stripes()

    def take_output(self, other: Session) -> None:
        """Take the output that another session has not sent."""
        assert isinstance(other._channel, StreamChannel)
        for task, stream, text in other._channel.take_unsent(FrameKind.LOG):
            self._logs.add(task, stream, text)
        for task, stream, text in other._logs.take():
            self._logs.add(task, stream, text)

    def _drop_stripes(self) -> None:
        stripes, self._stripes = self._stripes, {}
        for ends in stripes.values():
            ends.close()

    def _unwatch(self) -> None:
        self._set_blocked(False)
        self._loop.forget(self._channel)

    def drain(self) -> None:
        """Read what a peer that has ended left in the stream, and drop the link."""
        channel = self._channel
        assert isinstance(channel, StreamChannel)
        while not self.is_closed and channel.is_attached:
            if not self._read():
                self._link_gone()

    def _link_gone(self) -> None:
        if self.token:
            self._detach()
        else:
            self.close()

    # In -------------------------------------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Read once; return False if there was nothing to read."""
        try:
            for frame in self._channel.receive():
                self._on_frame(self, frame)
                if self.is_closed:
                    return True
        except BlockingIOError:  # no more frames for now
            return False
        except ChannelClosed:
            self._link_gone()
        except (InternalError, OSError) as error:
            # An invalid frame, or no room for a blob. Either way the rest of the stream cannot be understood.
            complain(None, f"agent closed a connection: {error}")
            self.close()
        else:
            if self._channel.pings != self._pings:  # a pinging client is alive, so its ping renews the lease too
                self._pings = self._channel.pings
                self._on_frame(self, Frame(FrameKind.PING, 0, 0, 0, b""))
            if self._channel.needs_flush:
                self.flush()
        return True

    # Out ------------------------------------------------------------------------------------------------------------

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0, fd: int = -1) -> None:
        """Send a control frame or a blob."""
        self._channel.queue(kind, ident, body, lane=lane, fd=fd, priority=BLOBS if kind == FrameKind.BLOB else CONTROL)
        self.flush()

    def send_result(self, frame: Frame) -> None:
        """Send a frame of a task, with its blob if it has one, behind all earlier output."""
        if self.is_closed:
            return
        flags = frame.flags & ~(HAS_FD | QUIET)
        priority = self._priority(frame)
        if frame.fd < 0 and not self._logs and not self._is_blocked:
            # Results of several slots, or several of one, leave together.
            self._channel.queue(frame.kind, frame.ident, frame.body, flags=flags, lane=frame.lane, priority=priority)
            self._loop.at_end_of_turn(self.flush)
            return
        self._queue_logs()
        self._channel.queue(
            frame.kind, frame.ident, frame.body, flags=flags, lane=frame.lane, fd=frame.fd, priority=priority
        )
        self.flush()

    def _priority(self, frame: Frame) -> int:
        """Choose a priority. On a stream blobs are slow: other results overtake them, those of the same task do not."""
        if self._channel.passes_fds:
            return RESULTS
        if frame.kind in _MESSAGES:  # as bulky as blobs, and in one line, because their order counts
            return BLOBS
        if frame.kind == FrameKind.BLOB or frame.flags & IN_ORDER:
            self._bulky.add(frame.ident)
        elif frame.ident not in self._bulky:
            return RESULTS
        elif frame.kind in _FINAL:
            self._bulky.discard(frame.ident)
        return BLOBS

    def call_ended(self, call: int) -> None:
        """Forget a call of a task, of which nothing more is sent."""
        self._bulky.discard(call)

    def add_log(self, task: int, stream: int, text: bytes) -> None:
        self._logs.add(task, stream, text)

    def flush(self) -> None:
        if self.is_closed:
            return
        try:
            if not self._is_blocked and self._logs and not self._channel.has_output:
                self._queue_logs()
            is_empty = self._channel.flush()
            if self._logs and not self._channel.has_output:
                self._queue_logs()
                is_empty = self._channel.flush()
        except ChannelClosed:
            # Not closed here: `_read` does, after the frames that the peer sent before it left, such as SHUTDOWN.
            return
        self._set_blocked(not is_empty)

    def _set_blocked(self, is_blocked: bool) -> None:
        if is_blocked == self._is_blocked:
            return
        self._is_blocked = is_blocked
        read_fd, write_fd = self._channel.fileno(), self._channel.write_fileno()
        if read_fd == write_fd:
            self._loop.watch(read_fd, self._read, self._unblocked if is_blocked else None)
        elif is_blocked:
            self._loop.watch(write_fd, self._unblocked, self._unblocked)
        else:
            self._loop.forget(write_fd)

    def _unblocked(self) -> None:
        self.flush()
        if not self._is_blocked and self._logs:
            self.flush()

    def _queue_logs(self) -> None:
        """Queue output ahead of the next value.

        If the peer does not read, output beyond the limit is dropped except its last lines: they say why a task failed.
        """
        if not self._channel.has_output:
            self._waiting_logs = 0
        if self._waiting_logs >= self._log_limit_bytes:
            self._logs.trim(_LAST_WORDS)
        for task, stream, text in self._logs.take():
            self._waiting_logs += weight(stream, text)
            kind = FrameKind.DISPLAY if stream == DISPLAYS else FrameKind.LOG
            self._channel.queue(kind, task, text, lane=stream, priority=RESULTS)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._unwatch()
        self._channel.close()
        self._drop_stripes()
        for fd in self._passed:
            with contextlib.suppress(OSError):  # already closed
                os.close(fd)
        self._on_close(self)
