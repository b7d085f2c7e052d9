"""Channels: frames over a socket, with priorities and, between processes of one machine, file descriptors."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections import deque

from .blobs import Blob
from .frames import HAS_FD, HEADER, Frame, FrameParser

CONTROL, RESULTS, BLOBS = 0, 1, 2
"""Priorities, first to last. Logs travel with results, so that a call's output arrives before its value."""

_READ_SIZE = 64 * 1024
"""Bytes. Python allocates the buffer for each read; above 128 KiB malloc maps and unmaps it, which costs 12 us."""
_FD_SPACE = socket.CMSG_SPACE(16 * array.array("i").itemsize)
_RECEIVE_FLAGS = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # macOS has no such flag; an int: enums are slow
_TRUNCATED = int(socket.MSG_CTRUNC)
_BATCH_BYTES = 256 * 1024
_BATCH_FRAMES = 1024
"""Most frames in one write. A thread may wait for the interpreter after each, while another one computes."""


class ChannelClosed(ConnectionError):
    """End of a channel, because the peer closed it or the link broke."""


def receive(sock: socket.socket, parser: FrameParser, flags: int = 0) -> list[Frame]:
    """Read once and return the complete frames.

    Raises:
        ChannelClosed: The stream has ended.
        BlockingIOError: There is nothing to read.
    """
    try:
        piece, ancillary, message_flags, _ = sock.recvmsg(_READ_SIZE, _FD_SPACE, _RECEIVE_FLAGS | flags)
    except ConnectionError as error:
        raise ChannelClosed(str(error)) from error
    if ancillary:
        parser.add_fds(_descriptors(ancillary))
    if message_flags & _TRUNCATED:
        # This process may open no more files, so the kernel dropped the descriptor. Put -1 in its place: otherwise the
        # next frame with a descriptor would be paired with the wrong one.
        parser.add_fds([-1])
    if not piece:
        raise ChannelClosed("end of stream")
    return parser.feed(piece)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    received = list(fds)
    if not _RECEIVE_FLAGS:
        for fd in received:
            os.set_inheritable(fd, False)
    return received


class Channel:
    """Frames over a non-blocking socket.

    Not thread-safe: the owner holds a lock, or is the only thread. No method blocks. `queue` duplicates file
    descriptors at once, so the caller may close its own.
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

    # The rest of `StreamChannel`'s interface. A socket on this machine neither breaks nor falls silent: when the peer
    # is gone, the kernel says so at once.
    heard_at = 0.0
    round_trip_s = 0.0
    pings = 0
    pongs = 0
    is_attached = True

    def ping(self, *, renews: bool = True) -> None:
        """Do nothing."""

    @property
    def needs_flush(self) -> bool:
        """Return whether received frames call for an answer of the channel's own; never on a socket."""
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
        """Queue a frame, and with it `fd` or the file of `blob`.

        Raises:
            OSError: There is no free descriptor or no room to duplicate `fd`, or to give `blob` a file.
        """
        if blob is not None or fd >= 0:
            flags |= HAS_FD
            fd = self._duplicate(fd, blob)
        self._out[priority].append((HEADER.pack(len(body), kind, flags, lane, ident) + body, fd))

    def _duplicate(self, fd: int, blob: Blob | None) -> int:
        """Duplicate a descriptor for the queue. If none is free, send first the ones that are queued."""
        try:
            return os.dup(fd if blob is None else blob.open())
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with contextlib.suppress(ChannelClosed):
                self.flush()
            return os.dup(fd if blob is None else blob.open())

    @property
    def has_output(self) -> bool:
        return self._partial is not None or any(self._out)

    def send(self, frame: bytes, priority: int = CONTROL) -> bool:
        """Queue one packed frame without a descriptor, and flush.

        Cheaper than `queue` and `flush` if no other output waits, because the frame goes straight to the socket.
        """
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
        """Send as much as the socket takes. Return whether nothing is left.

        Raises:
            ChannelClosed: The peer is gone.
        """
        try:
            while self._partial is not None:
                self._sent(self._partial, self.sock.send(self._partial))
            for lane in self._out:
                while lane:
                    self._send_from(lane)
                    while self._partial is not None:
                        self._sent(self._partial, self.sock.send(self._partial))
        except BlockingIOError:  # the socket is full
            return False
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from error
        return True

    def _send_from(self, lane: deque[tuple[bytes, int]]) -> None:
        frame, fd = lane[0]
        if fd >= 0:
            # Leave the frame in its lane until the kernel has accepted it: a full socket raises here, and the
            # descriptor must go with the frame's first byte. The rest of the frame then needs no descriptor.
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
        """Read once and return the complete frames; see the function `receive`."""
        return receive(self.sock, self._parser)

    def close(self) -> None:
        for lane in self._out:
            for _, fd in lane:
                if fd >= 0:
                    os.close(fd)
            lane.clear()
        self.sock.close()

    def release(self) -> None:
        """Do nothing: this channel has one link for life."""

    def finish(self, deadline: float) -> None:
        """Do nothing: the peer's socket buffer already has everything that was flushed."""

    def close_in_child(self) -> None:
        """Close this process's copy after a fork. The parent's channel stays open."""
        self.sock.close()


def _joined(lane: deque[tuple[bytes, int]]) -> bytes:
    """Take the frames at the front that carry no descriptor and join them: one system call for many small frames."""
    pieces: list[bytes] = []
    size = 0
    while lane and lane[0][1] < 0 and size < _BATCH_BYTES and len(pieces) < _BATCH_FRAMES:
        piece, _ = lane.popleft()
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)
