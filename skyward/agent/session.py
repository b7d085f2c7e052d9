"""One connection to the agent: the client's, or the keeper's."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

from ..errors import InternalError
from ..wire.channel import BLOBS, CONTROL, RESULTS, Channel, ChannelClosed
from ..wire.frames import HAS_FD, QUIET, Frame, Kind, pack
from .loop import Loop
from .output import LogBuffer

__all__ = ["Session"]


class Session:
    """Frames in by `on_frame`; frames out in order of priority, output bounded by `log_limit_bytes`.

    A peer that does not read delays only itself: results wait (there are never more than tasks), output is dropped
    from the oldest on.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        log_limit_bytes: int,
        on_frame: Callable[[Session, Frame], None],
        on_close: Callable[[Session], None],
    ) -> None:
        self._loop = loop
        self._channel = Channel(sock)
        self._on_frame = on_frame
        self._on_close = on_close
        self._logs = LogBuffer(log_limit_bytes)
        self._is_blocked = False
        self.is_closed = False
        self.role = ""
        loop.watch(self._channel, self._read)

    def _read(self) -> None:
        try:
            for frame in self._channel.receive():
                self._on_frame(self, frame)
                if self.is_closed:
                    return
        except BlockingIOError:
            return
        except ChannelClosed:
            self.close()
        except InternalError as error:  # what comes is no frame: nothing that follows can be understood either
            sys.stderr.write(f"skyward: a connection to the agent was closed: {error}\n")
            sys.stderr.flush()
            self.close()

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0, fd: int = -1) -> None:
        """Control frames and blobs."""
        self._channel.queue(kind, ident, body, lane=lane, fd=fd, priority=BLOBS if kind == Kind.BLOB else CONTROL)
        self.flush()

    def send_result(self, frame: Frame) -> None:
        """A frame of a task, with the blob that may ride on it; behind all output that came before it."""
        if self.is_closed:
            return
        flags = frame.flags & ~(HAS_FD | QUIET)
        if frame.fd < 0 and not self._logs and not self._is_blocked:
            try:
                is_empty = self._channel.send(
                    pack(frame.kind, frame.ident, frame.body, flags=flags, lane=frame.lane), RESULTS
                )
            except ChannelClosed:
                return  # `_read` closes, behind what the peer sent before it went: a SHUTDOWN, say
            self._set_blocked(not is_empty)
            return
        self._queue_logs()
        self._channel.queue(
            frame.kind, frame.ident, frame.body, flags=flags, lane=frame.lane, fd=frame.fd, priority=RESULTS
        )
        self.flush()

    def add_log(self, task: int, stream: int, text: bytes) -> None:
        self._logs.add(task, stream, text)

    def flush(self) -> None:
        if self.is_closed:
            return
        try:
            if not self._is_blocked and self._logs and not self._channel.has_output:
                self._queue_logs()
            is_empty = self._channel.flush()
        except ChannelClosed:
            return  # as above
        self._set_blocked(not is_empty)

    def _set_blocked(self, is_blocked: bool) -> None:
        if is_blocked != self._is_blocked:
            self._is_blocked = is_blocked
            self._loop.watch(self._channel, self._read, self._unblocked if is_blocked else None)

    def _unblocked(self) -> None:
        self.flush()
        if not self._is_blocked and self._logs:
            self.flush()

    def _queue_logs(self) -> None:
        for task, stream, text in self._logs.take():
            self._channel.queue(Kind.LOG, task, text, lane=stream, priority=RESULTS)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.forget(self._channel)
        self._channel.close()
        self._on_close(self)
