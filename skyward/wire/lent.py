"""Streams of bytes that a channel carries: both its ends have a descriptor, and the bytes between travel as frames.

The client lends its own channels to the nodes in this way: it runs the command that reaches a node, and the head at the
other end of the channel has a socket that stands for that command. Neither looks at the bytes.

    LENT_BYTES  some bytes, in order
    LENT_TAKEN  u32: number of further bytes that were passed on
    END_LENT    the stream has ended; the body says more for those who care

Each direction of a stream has at most `WINDOW_BYTES` on the way. So a node that does not read holds up only itself.

One thread reads all descriptors. The thread that takes a frame off the channel writes its bytes at once, if they fit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from .frames import FrameKind

_log = logging.getLogger(__name__)

WINDOW_BYTES: Final = 1 << 20
_REPORT_BYTES: Final = WINDOW_BYTES // 8
"""Bytes from which the receiver reports what it has passed on."""
_READ_SIZE: Final = 128 * 1024
_COUNT = struct.Struct("<I")

Tell = Callable[[int, int, bytes], object]
"""Sends a frame of the channel: kind, number of the stream and body. Thread-safe; does not wait."""


def _nothing() -> None:
    return None


class _LentStream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.fd = -1
        self.ended: Callable[[], object] = _nothing
        self.credit = WINDOW_BYTES
        """Bytes that may still be read here before the other side has passed some on."""
        self.waiting: deque[memoryview] = deque()
        """Bytes for the descriptor that it has not taken."""
        self.taken = 0
        """Bytes passed on that the other side does not know of."""
        self.is_ending = False
        """Whether the other side has ended it: it ends here once all bytes are passed on."""
        self.is_over = False
        self.events = 0

    def wanted(self) -> int:
        """Return the events of its descriptor to wait for."""
        reads = select.POLLIN if self.credit > 0 else 0
        return reads | (select.POLLOUT if self.waiting else 0)


class LentStreams:
    """Streams that one channel carries. Thread-safe.

    Args:
        tell: Sends a frame of the channel. It is called without any lock of this object.
        name: Name of the thread.
    """

    def __init__(self, tell: Tell, name: str) -> None:
        self._tell = tell
        self._name = name
        self._lock = threading.Lock()
        self._streams: dict[int, _LentStream] = {}
        self._by_fd: dict[int, _LentStream] = {}
        self._poll: Any = None
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def open(self, number: int) -> None:
        """Keep the bytes of a stream from now on, until `bind` says where they go."""
        with self._lock:
            self._streams[number] = _LentStream(number)

    def bind(self, number: int, fd: int, ended: Callable[[], object]) -> bool:
        """Carry what a descriptor reads and writes. Return False if the stream has ended meanwhile.

        Args:
            number: Number of a stream that was opened, as the other side knows it.
            fd: The descriptor. It must not block, and stays the caller's.
            ended: Called once, in any thread, when the stream has ended on either side. It tells the other side, if
                that does not know, and closes the descriptor. Nothing here uses the descriptor any longer.
        """
        with self._lock:
            stream = self._streams.get(number)
            if stream is None or self._is_closed:
                return False
            stream.fd, stream.ended = fd, ended
            self._by_fd[fd] = stream
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            is_over, taken = self._write(stream)
        self._after_write(stream, is_over=is_over, taken=taken)
        self._wake()
        return True

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the open streams."""
        with self._lock:
            return tuple(self._streams)

    def drop(self, number: int) -> None:
        """Forget a stream that will not be bound."""
        with self._lock:
            stream = self._streams.get(number)
            if stream is not None:
                self._forget(stream)

    def close(self) -> None:
        """End all streams, and the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            streams = list(self._streams.values())
            for stream in streams:
                self._forget(stream)
        for stream in streams:
            stream.ended()
        if self._thread is None:
            self._wake_read.close()
            self._wake_write.close()
        self._wake()

    def forget_in_child(self) -> None:
        """Close the descriptors in a fork of this process. No lock is taken: its holder may not exist there."""
        self._lock = threading.Lock()
        self._is_closed = True
        self._streams, self._by_fd = {}, {}
        poll, self._poll = self._poll, None
        if hasattr(poll, "close"):
            poll.close()
        self._wake_read.close()
        self._wake_write.close()

    def join(self) -> None:
        """Wait for the thread, once it was told to end."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    # Frames of the other side -----------------------------------------------------------------------------------------

    def on_bytes(self, number: int, data: bytes) -> None:
        """Pass bytes on, or keep them until the descriptor takes more."""
        with self._lock:
            stream = self._streams.get(number)
            if stream is None:
                return
            stream.waiting.append(memoryview(data))
            is_over, taken = self._write(stream)
        self._after_write(stream, is_over=is_over, taken=taken)

    def on_taken(self, number: int, body: bytes) -> None:
        with self._lock:
            stream = self._streams.get(number)
            if stream is None:
                return
            was_full = stream.credit <= 0
            stream.credit += _COUNT.unpack(body)[0]
        if was_full:
            self._wake()

    def on_end(self, number: int) -> None:
        """End a stream behind the bytes that came before."""
        with self._lock:
            stream = self._streams.get(number)
            if stream is None:
                return
            stream.is_ending = True
            is_over = not stream.waiting and self._forget(stream)
        if is_over:
            stream.ended()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _forget(self, stream: _LentStream) -> bool:
        """Forget a stream. Return False if it was forgotten before."""
        if stream.is_over:
            return False
        stream.is_over = True
        del self._streams[stream.number]
        self._by_fd.pop(stream.fd, None)
        if self._poll is not None and stream.events:
            with contextlib.suppress(OSError, KeyError):  # not registered yet
                self._poll.unregister(stream.fd)
        return True

    def _write(self, stream: _LentStream) -> tuple[bool, int]:
        """Write as much as the descriptor takes. Return whether the stream is over, and the bytes to report."""
        if stream.fd < 0:
            return False, 0
        try:
            while stream.waiting:
                piece = stream.waiting[0]
                sent = os.write(stream.fd, piece)
                stream.taken += sent
                if sent == len(piece):
                    stream.waiting.popleft()
                else:
                    stream.waiting[0] = piece[sent:]
        except BlockingIOError:
            self._wake()
        except OSError:  # the other end of the descriptor is gone
            return self._forget(stream), 0
        if not stream.waiting and stream.is_ending:
            return self._forget(stream), 0
        taken = stream.taken
        if taken < _REPORT_BYTES:
            return False, 0
        stream.taken = 0
        return False, taken

    def _after_write(self, stream: _LentStream, *, is_over: bool, taken: int) -> None:
        if taken:
            self._tell(FrameKind.LENT_TAKEN, stream.number, _COUNT.pack(taken))
        if is_over:
            stream.ended()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a full socket wakes the thread as well; a closed one has no waiter
            self._wake_write.send(b"\0")

    def _run(self) -> None:
        try:
            self._pass_on()
        except BaseException:  # even SystemExit: the links over these streams are made again
            _log.exception("%s: its thread failed, so all its streams end", self._name)
        finally:
            self._end()

    def _end(self) -> None:
        """End this thread, and all streams unless `close` has. The next stream that is bound gets another thread."""
        with self._lock:
            poll, self._poll = self._poll, None
            streams = list(self._by_fd.values())
            for stream in streams:
                self._forget(stream)
            self._thread = None if not self._is_closed else self._thread
        for stream in streams:
            stream.ended()
        if hasattr(poll, "close"):
            poll.close()
        if self._is_closed:
            self._wake_read.close()
            self._wake_write.close()

    def _pass_on(self) -> None:
        poll = select.epoll() if hasattr(select, "epoll") else select.poll()
        poll.register(self._wake_read.fileno(), select.POLLIN)
        with self._lock:
            self._poll = poll
        while not self._is_closed:
            self._watch()
            for fd, events in poll.poll():
                if fd == self._wake_read.fileno():
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                    continue
                if events & select.POLLOUT:
                    self._unblocked(fd)
                if events & ~select.POLLOUT:
                    self._readable(fd)

    def _watch(self) -> None:
        """Wait for the right events of each descriptor."""
        with self._lock:
            for stream in self._streams.values():
                wanted = stream.wanted()
                if stream.fd < 0 or wanted == stream.events:
                    continue
                if not stream.events:
                    self._poll.register(stream.fd, wanted)
                elif not wanted:
                    self._poll.unregister(stream.fd)
                else:
                    self._poll.modify(stream.fd, wanted)
                stream.events = wanted

    def _unblocked(self, fd: int) -> None:
        with self._lock:
            stream = self._by_fd.get(fd)
            if stream is None:
                return
            is_over, taken = self._write(stream)
        self._after_write(stream, is_over=is_over, taken=taken)

    def _readable(self, fd: int) -> None:
        with self._lock:
            stream = self._by_fd.get(fd)
            if stream is None or stream.credit <= 0:
                return
            try:
                data = os.read(fd, min(_READ_SIZE, stream.credit))
            except BlockingIOError:
                return
            except OSError:
                data = b""
            stream.credit -= len(data)
            is_over = not data and self._forget(stream)
        if data:
            self._tell(FrameKind.LENT_BYTES, stream.number, data)
        elif is_over:
            stream.ended()
