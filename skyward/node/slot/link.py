"""A slot's side of its socket to the agent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Literal, Protocol

from ...wire.blobs import DIGEST_SIZE
from ...wire.channel import receive
from ...wire.frames import HAS_FD, PROTOCOL_VERSION, QUIET, Frame, FrameKind, FrameParser, pack
from ...wire.payloads import Encoded

__all__ = ["SlotLine", "Link", "Replies", "blob_body", "connect_task", "read_blob_body"]


def blob_body(digest: bytes, size: int, offset: int = 0) -> bytes:
    """The fixed part of a BLOB frame; without a descriptor, a piece of the blob follows it."""
    return digest + size.to_bytes(8, "little") + offset.to_bytes(8, "little")


def read_blob_body(body: bytes) -> tuple[bytes, int, int, bytes]:
    """(digest, size of the whole, offset of this piece, the piece)"""
    at = DIGEST_SIZE
    size = int.from_bytes(body[at : at + 8], "little")
    offset = int.from_bytes(body[at + 8 : at + 16], "little")
    return body[:DIGEST_SIZE], size, offset, body[at + 16 :]


class Replies(Protocol):
    """Where what comes of a task is sent."""

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, flags: int = 0, lane: int = 0) -> None: ...

    def send_payload(self, kind: int, ident: int, payload: Encoded, elapsed_ns: int = 0, *, flags: int = 0) -> None: ...


class Link:
    """Frames over a blocking socket. Any thread may send; one reads.

    A frame must never be cut in two by an exception: the worker's signal handler raises only while user code runs.
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
        """The payload's blobs, then the frame that needs them."""
        with self._lock:
            for blob in payload.blobs:
                frame = pack(FrameKind.BLOB, ident, blob_body(blob.digest, blob.size), flags=HAS_FD)
                sent = socket.send_fds(self._sock, [frame], [blob.fd])
                if sent < len(frame):
                    self._sock.sendall(frame[sent:])
                blob.close()
            self._sock.sendall(pack(kind, ident, payload.with_elapsed(elapsed_ns), flags=flags))

    def receive(self) -> Frame:
        """The next frame; waits for it. Raises ChannelClosed when the agent is gone."""
        while not self._read:
            self._read.extend(receive(self._sock, self._parser))
        return self._read.popleft()

    @property
    def has_more(self) -> bool:
        """Whether frames were read that nobody has taken."""
        return bool(self._read)

    def waiting(self) -> Iterator[Frame]:
        """Frames that are here already; never waits."""
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
        """End the connection for whoever reads it, also where a process that user code has forked holds it, too."""
        with contextlib.suppress(OSError):  # the agent was quicker
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def connect_task(agent: str, task: int, role: Literal["task", "caller"]) -> Link:
    """Connect a running task to its node's agent, beside its slot, whose socket is read between calls only.

    Args:
        agent: path of the agent's socket.
        role: "task" answers questions, "caller" makes calls.

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
    """The direct line from the client to this slot: a short call and its value, with no agent in between.

    Only a plain value of a call that wrote nothing goes back here. Everything else (errors, blobs, values that must
    come behind the call's output) takes the way through the agent, which sees to its order; the client is told.
    """

    def __init__(self, sock: socket.socket, link: Link) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._link = link
        self._parser = FrameParser()

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> list[Frame]:
        """Frames of one read; waits for it. Raises ChannelClosed when the client is gone."""
        return receive(self._sock, self._parser)

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, flags: int = 0, lane: int = 0) -> None:
        self._say_elsewhere(ident)
        self._link.send(kind, ident, body, flags=flags, lane=lane)

    def send_payload(self, kind: int, ident: int, payload: Encoded, elapsed_ns: int = 0, *, flags: int = 0) -> None:
        if payload.blobs or not flags & QUIET:
            self._say_elsewhere(ident)
            self._link.send_payload(kind, ident, payload, elapsed_ns, flags=flags)
            return
        with contextlib.suppress(ConnectionError):  # the client went away; its agent ends us next
            self._sock.sendall(pack(kind, ident, payload.with_elapsed(elapsed_ns)))

    def _say_elsewhere(self, ident: int) -> None:
        with contextlib.suppress(ConnectionError):  # the client went away; the agent ends us next
            self._sock.sendall(pack(FrameKind.ELSEWHERE, ident))
