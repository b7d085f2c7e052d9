"""Channels to the nodes that the client lends: it runs the command that reaches a node, and passes its bytes on.

Here a socket stands for that command. So a link of the head is dialled, watched and dialled again as any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from functools import partial

from ...errors import Unreachable
from ...values.machine import Machine
from ...wire.frames import Frame, FrameKind
from ...wire.lent import LentStreams
from ..dialler import Connect, DialledEnds

_BUFFER_SIZE = 256 << 10


class LentEnds(DialledEnds):
    """One end of a socket whose other end is carried to the client."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, fd)
        self.code: int | None = None
        """Exit code of the client's command, once it has ended."""
        self.words = ""

    def said(self) -> str:
        return self.words

    def exit_code(self, limit_s: float) -> int | None:
        return self.code

    def kill(self) -> None:
        fd = self.read_fd
        if fd < 0:
            return
        sock = socket.socket(fileno=fd)
        try:
            with contextlib.suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)
        finally:
            sock.detach()


class LentLinks:
    """Links over channels that the client lends.

    Args:
        next_number: Returns a number that nothing else has.
        tell: Sends the client a frame: kind, number, body and lane.
    """

    def __init__(self, next_number: Callable[[], int], tell: Callable[[int, int, bytes, int], object]) -> None:
        self._next_number = next_number
        self._tell = tell
        self._streams = LentStreams(lambda kind, number, body: tell(kind, number, body, 0), "skyward-lent")
        self._ends: dict[int, LentEnds] = {}
        self.handlers: dict[int, Callable[[Frame], object]] = {
            FrameKind.LENT_BYTES: lambda frame: self._streams.on_bytes(frame.ident, frame.body),
            FrameKind.LENT_TAKEN: lambda frame: self._streams.on_taken(frame.ident, frame.body),
            FrameKind.END_LENT: self._on_end,
        }
        """Handlers of the client's frames, by kind."""

    def way_to(self, machine: Machine) -> Connect:
        """Return the function that opens a link to a machine's agent."""
        return partial(self._connect, machine.node)

    def _connect(self, node: int) -> LentEnds:
        number = self._next_number()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            problem = f"node {node}: no socket for a link to it ({error.strerror})"
            raise Unreachable(f"{problem}; free memory and descriptors on the head's machine", node=None) from error
        for sock in (ours, theirs):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_SIZE)
        ends = self._ends[number] = LentEnds(ours.detach())
        fd = theirs.detach()
        self._streams.open(number)
        self._tell(FrameKind.LEND, number, b"", node)
        if not self._streams.bind(number, fd, partial(self._ended, number, fd)):
            self._ended(number, fd)
        return ends

    def _on_end(self, frame: Frame) -> None:
        """Note how the client's command ended, and end the stream."""
        ends = self._ends.pop(frame.ident, None)
        if ends is not None:
            end = json.loads(frame.body)
            ends.code, ends.words = end["code"], end["said"]
        self._streams.on_end(frame.ident)

    def _ended(self, number: int, fd: int) -> None:
        if self._ends.pop(number, None) is not None:  # the client does not know yet
            self._tell(FrameKind.END_LENT, number, b"", 0)
        os.close(fd)

    def end_all(self) -> None:
        """End the streams of a client that is gone. Later ones are those of the next."""
        numbers, self._ends = list(self._ends), {}
        for number in numbers:
            self._streams.on_end(number)

    def close(self) -> None:
        """End all streams."""
        self._streams.close()
        self._streams.join()
