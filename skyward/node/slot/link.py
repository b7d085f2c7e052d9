"""Slot side of the socket to the agent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Literal, Protocol

from ...wire.blobs import DIGEST_SIZE, Blob
from ...wire.channel import receive
from ...wire.frames import HAS_FD, KEPT, PROTOCOL_VERSION, QUIET, Frame, FrameKind, FrameParser, pack
from ...wire.payloads import Encoded
from ...wire.pull import LEAST_SIZE, is_possible


def blob_body(digest: bytes, size: int, offset: int = 0) -> bytes:
    """Pack the fixed part of a BLOB frame. Without a descriptor, a piece of the blob follows it."""
    return digest + size.to_bytes(8, "little") + offset.to_bytes(8, "little")


def read_blob_body(body: bytes) -> tuple[bytes, int, int, bytes]:
    """Unpack a BLOB frame: digest, total size, offset of this piece, and the piece."""
    at = DIGEST_SIZE
    size = int.from_bytes(body[at : at + 8], "little")
    offset = int.from_bytes(body[at + 8 : at + 16], "little")
    return body[:DIGEST_SIZE], size, offset, body[at + 16 :]


class Replies(Protocol):
    """Receiver of a task's outcome."""

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, flags: int = 0, lane: int = 0) -> None: ...

    def send_payload(self, kind: int, ident: int, payload: Encoded, elapsed_ns: int = 0, *, flags: int = 0) -> None: ...

    def may_lend(self, size: int) -> bool:
        """Return whether the receiver may copy a value of that many bytes from this process's memory."""
        ...

    def lend(self, ident: int, payload: Encoded, elapsed_ns: int) -> bool:
        """Send a value whose buffers stay here, and wait until they are copied. Return False if they cannot be."""
        ...


class Link:
    """Frames over a blocking socket. Any thread may send; one thread reads.

    An exception must never cut a frame in two. So the worker's signal handler raises only while user code runs.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._parser = FrameParser()
        self._read: deque[Frame] = deque()
        self._lock = threading.Lock()

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, flags: int = 0, lane: int = 0) -> None:
        with self._lock:
            self._sock.sendall(pack(kind, ident, body, flags=flags, lane=lane))

    def send_payload(self, kind: int, ident: int, payload: Encoded, elapsed_ns: int = 0, *, flags: int = 0) -> None:
        """Send the payload's blobs, then the frame that needs them."""
        with self._lock:
            self._send_blobs(ident, payload.blobs, flags)
            self._sock.sendall(pack(kind, ident, payload.with_elapsed(elapsed_ns), flags=flags))

    def may_lend(self, size: int) -> bool:
        return False

    def lend(self, ident: int, payload: Encoded, elapsed_ns: int) -> bool:
        return False

    def keep(self, ident: int, blobs: tuple[Blob, ...]) -> None:
        """Send blobs that stay on the node."""
        with self._lock:
            self._send_blobs(ident, blobs, KEPT)

    def _send_blobs(self, ident: int, blobs: tuple[Blob, ...], flags: int) -> None:
        for blob in blobs:
            frame = pack(FrameKind.BLOB, ident, blob_body(blob.digest, blob.size), flags=HAS_FD | flags & KEPT)
            # The descriptor travels with the first byte, so the rest of a partly sent frame needs none.
            sent = socket.send_fds(self._sock, [frame], [blob.fd])
            if sent < len(frame):
                self._sock.sendall(frame[sent:])
            blob.close()

    def receive(self) -> Frame:
        """Wait for the next frame. Raises ChannelClosed when the agent is gone."""
        while not self._read:
            self._read.extend(receive(self._sock, self._parser))
        return self._read.popleft()

    @property
    def has_more(self) -> bool:
        """Return whether frames were read but not yet taken."""
        return bool(self._read)

    def waiting(self) -> Iterator[Frame]:
        """Yield frames that have already arrived; never waits."""
        try:
            while True:
                self._read.extend(receive(self._sock, self._parser, socket.MSG_DONTWAIT))
        except BlockingIOError:  # no more frames for now
            pass
        while self._read:
            yield self._read.popleft()

    def fileno(self) -> int:
        return self._sock.fileno()

    def shut_down(self) -> None:
        """End the connection for its reader, even if a process forked by user code still holds the socket."""
        with contextlib.suppress(OSError):  # the agent has already closed it
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def connect_task(agent: str, task: int, role: Literal["task", "caller", "channels"]) -> Link:
    """Connect a running task to its node's agent. The slot's own socket will not do: it is read only between calls.

    Args:
        agent: path of the agent's socket.
        task: number of the task.
        role: "task" answers questions, "caller" makes calls, "channels" exchanges messages.

    Raises:
        OSError: the agent cannot be reached.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    hello = {"version": PROTOCOL_VERSION, "role": role, "task": task, "pid": os.getpid()}
    try:
        sock.connect(agent)
        link = Link(sock)
        link.send(FrameKind.HELLO, body=json.dumps(hello).encode())
    except OSError:
        sock.close()
        raise
    return link


class SlotLine:
    """Direct line between the client and this slot: short calls and their values bypass the agent.

    Only plain values of calls that wrote no output return here. Everything else goes through the agent, which keeps
    the order: errors, blobs, and values that must follow their call's output. The client is notified of the detour.
    """

    def __init__(self, sock: socket.socket, link: Link) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._link = link
        self._parser = FrameParser()
        self._read: list[Frame] = []
        """Frames that came behind the answer to a lent value."""
        self._is_refused = False
        """Whether the client could not read this process's memory."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> list[Frame]:
        """Wait for one read and return its frames. Raises ChannelClosed when the client is gone."""
        frames, self._read = self._read, []
        return frames or receive(self._sock, self._parser)

    @property
    def has_more(self) -> bool:
        """Return whether frames were read but not yet taken."""
        return bool(self._read)

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, flags: int = 0, lane: int = 0) -> None:
        self._say_elsewhere(ident)
        self._link.send(kind, ident, body, flags=flags, lane=lane)

    def send_payload(self, kind: int, ident: int, payload: Encoded, elapsed_ns: int = 0, *, flags: int = 0) -> None:
        if payload.has_references or not flags & QUIET:
            self._say_elsewhere(ident)
            self._link.send_payload(kind, ident, payload, elapsed_ns, flags=flags)
            return
        with contextlib.suppress(ConnectionError):  # the client is gone; its agent is about to end this process
            self._sock.sendall(pack(kind, ident, payload.with_elapsed(elapsed_ns)))

    def may_lend(self, size: int) -> bool:
        return size >= LEAST_SIZE and is_possible() and not self._is_refused

    def lend(self, ident: int, payload: Encoded, elapsed_ns: int) -> bool:
        try:
            self._sock.sendall(pack(FrameKind.RESULT, ident, payload.with_elapsed(elapsed_ns)))
            answer, *self._read = self._answer()
        except ConnectionError:  # only the agent knows whether the client is gone
            return False
        self._is_refused = bool(answer.lane)
        return not self._is_refused

    def _answer(self) -> list[Frame]:
        """Wait for COPIED, and return it with the frames that came behind it. If the client dies, the line ends."""
        while True:
            frames = self.receive()
            for at, frame in enumerate(frames):
                if frame.kind == FrameKind.COPIED:
                    return frames[at:]

    def _say_elsewhere(self, ident: int) -> None:
        with contextlib.suppress(ConnectionError):  # the client is gone; its agent is about to end this process
            self._sock.sendall(pack(FrameKind.ELSEWHERE, ident))
