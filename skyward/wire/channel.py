"""A channel: frames over a socket, with priorities and, between processes of one machine, file descriptors."""

from __future__ import annotations

import array
import os
import socket
from collections import deque

from .blobs import Blob
from .frames import HAS_FD, HEADER, Frame, FrameParser

__all__ = ["BLOBS", "CONTROL", "RESULTS", "Channel", "ChannelClosed", "receive"]

CONTROL, RESULTS, BLOBS = 0, 1, 2
"""Priorities, first to last. Logs travel with results, so that a call's output arrives before its value."""

_READ_SIZE = 64 * 1024
"""Bytes. Python allocates the buffer for each read; above 128 KiB malloc maps and unmaps it, which costs 12 us."""
_FD_SPACE = socket.CMSG_SPACE(16 * array.array("i").itemsize)
_RECEIVE_FLAGS = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # macOS has no such flag; an int: enums are slow
_TRUNCATED = int(socket.MSG_CTRUNC)
_BATCH_BYTES = 256 * 1024
_BATCH_FRAMES = 64


class ChannelClosed(ConnectionError):
    """The peer is gone."""


def receive(sock: socket.socket, parser: FrameParser, flags: int = 0) -> list[Frame]:
    """One read. Raises ChannelClosed at the end of the stream and BlockingIOError when there is nothing to read."""
    try:
        piece, ancillary, said, _ = sock.recvmsg(_READ_SIZE, _FD_SPACE, _RECEIVE_FLAGS | flags)
    except ConnectionError as error:
        raise ChannelClosed(str(error)) from error
    if ancillary:
        parser.add_fds(_descriptors(ancillary))
    if said & _TRUNCATED:  # the kernel had no number for it: this process may open no more files
        parser.add_fds([-1])
    if not piece:
        raise ChannelClosed("end of stream")
    return parser.feed(piece)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    found = list(fds)
    if not _RECEIVE_FLAGS:
        for fd in found:
            os.set_inheritable(fd, False)
    return found


class Channel:
    """Frames over a non-blocking socket.

    Not thread-safe: the owner holds a lock, or is the only thread. `queue` never blocks; `flush` sends what the socket
    takes and says whether all is gone. File descriptors given to `queue` are duplicated at once, so that the caller
    may close its own.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.passes_fds = sock.family == socket.AF_UNIX
        self._parser = FrameParser()
        self._out: tuple[deque[tuple[bytes, int]], ...] = (deque(), deque(), deque())
        self._partial: memoryview | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    def write_fileno(self) -> int:
        return self.sock.fileno()

    heard_at = 0.0
    """When anything came last; a channel of this machine does not say."""
    round_trip_s = 0.0
    pings = 0
    pongs = 0
    is_attached = True

    def ping(self) -> None:
        """Nothing to ask: a peer on this machine is there, or the socket says that it is not."""

    @property
    def needs_flush(self) -> bool:
        """Whether what was received calls for an answer of the channel's own."""
        return False

    def queue(
        self,
        kind: int,
        ident: int = 0,
        body: bytes = b"",
        *,
        flags: int = 0,
        lane: int = 0,
        fd: int = -1,
        blob: Blob | None = None,
        priority: int = CONTROL,
    ) -> None:
        """`fd` goes along with the frame, or the file of `blob`. Raises OSError, only then: no descriptor is left."""
        if blob is not None:
            fd = blob.open()
        if fd >= 0:
            flags |= HAS_FD
            fd = os.dup(fd)
        self._out[priority].append((HEADER.pack(len(body), kind, flags, lane, ident) + body, fd))

    @property
    def has_output(self) -> bool:
        return self._partial is not None or any(self._out)

    def send(self, frame: bytes, priority: int = CONTROL) -> bool:
        """`queue` and `flush` of one packed frame without a descriptor, at less cost where nothing is waiting."""
        if self._partial is not None or self._out[0] or self._out[1] or self._out[2]:
            self._out[priority].append((frame, -1))
            return self.flush()
        try:
            sent = self.sock.send(frame)
        except BlockingIOError:
            sent = 0
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from error
        if sent == len(frame):
            return True
        self._partial = memoryview(frame)[sent:]
        return False

    def flush(self) -> bool:
        """Send what the socket takes. True: nothing is left. Raises ChannelClosed."""
        try:
            while self._partial is not None:
                self._sent(self._partial, self.sock.send(self._partial))
            for lane in self._out:
                while lane:
                    self._send_from(lane)
                    while self._partial is not None:
                        self._sent(self._partial, self.sock.send(self._partial))
        except BlockingIOError:  # the socket is full; the rest goes when it is not
            return False
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from error
        return True

    def _send_from(self, lane: deque[tuple[bytes, int]]) -> None:
        frame, fd = lane[0]
        if fd >= 0:
            sent = socket.send_fds(self.sock, [frame], [fd])
            os.close(fd)
            lane.popleft()
            self._sent(memoryview(frame), sent)
            return
        if len(lane) > 1:
            frame = _joined(lane)
        else:
            lane.popleft()
        try:
            sent = self.sock.send(frame)
        except BlockingIOError:
            self._partial = memoryview(frame)
            raise
        self._sent(memoryview(frame), sent)

    def _sent(self, data: memoryview, count: int) -> None:
        self._partial = data[count:] if count < len(data) else None

    def receive(self) -> list[Frame]:
        """Frames of one read; see the function `receive`."""
        return receive(self.sock, self._parser)

    def close(self) -> None:
        for lane in self._out:
            for _, fd in lane:
                if fd >= 0:
                    os.close(fd)
            lane.clear()
        self.sock.close()

    def release(self) -> None:
        """A channel of this machine has one link only."""

    def finish(self, deadline: float) -> None:
        """Before `close`, where all was flushed: a socket of this machine has it."""

    def close_in_child(self) -> None:
        """After a fork: the parent's channel goes on."""
        self.sock.close()


def _joined(lane: deque[tuple[bytes, int]]) -> bytes:
    """The frames at the front that carry no descriptor, as one piece: one system call for many small frames."""
    pieces: list[bytes] = []
    size = 0
    while lane and lane[0][1] < 0 and size < _BATCH_BYTES and len(pieces) < _BATCH_FRAMES:
        piece, _ = lane.popleft()
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)
