"""Frames between the process that trains and a process of ours beside it:  | kind u8 | length u64 | body |."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum

__all__ = ["MessageKind", "readable", "receive", "send"]

_HEAD = struct.Struct("<BQ")


class MessageKind(IntEnum):
    JOB = 1
    """To the worker: a payload of (state, packed job, contents)."""
    BEGUN = 2
    """From here on all are answers: everything is there, the time of the job runs."""
    DONE = 3
    """A pickled Scored."""
    FAILED = 4
    """A pickled Failure."""
    MISSING = 5
    """Pickled digests: send the job again, with them."""


def send(sock: socket.socket, kind: MessageKind, body: bytes = b"") -> None:
    """Raises OSError: nobody reads there any more."""
    sock.sendall(_HEAD.pack(kind, len(body)))
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[MessageKind, bytes] | None:
    """The next frame; waits for it. None: the other side has gone."""
    head = _exactly(sock, _HEAD.size)
    if head is None:
        return None
    kind, length = _HEAD.unpack(head)
    body = _exactly(sock, length)
    return None if body is None else (MessageKind(kind), bytes(body))


def readable(descriptors: Sequence[int], timeout_s: float | None) -> set[int]:
    """Which of them can be read now, or have ended; waits for one. Not `select`: that knows only low descriptors."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)}


def _exactly(sock: socket.socket, length: int) -> bytearray | None:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        try:
            count = sock.recv_into(view[done:])
        except ConnectionResetError:
            return None
        if not count:
            return None
        done += count
    return data
