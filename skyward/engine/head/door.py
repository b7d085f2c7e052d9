"""Door of a head: its socket, the stubs that connect to it, and the greeting of each link.

A client reaches a head as it reaches an agent: a stub passes two descriptors (`node.agent.attach`). HELLO and WELCOME
say what either side has received. A keeper comes the same way, renews the lease of the head, and can end it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import InternalError
from ...wire.channel import ChannelClosed, receive
from ...wire.ends import Ends
from ...wire.frames import HEADER, MAX_BODY, PROTOCOL_VERSION, FrameKind, FrameParser, pack
from ...wire.stream import MAGIC
from ..threads import in_words, start_thread

_log = logging.getLogger(__name__)

_GREETING_S = 20.0
"""Seconds for a stub and its client to say who they are."""
_KEEPER_S = 60.0
"""Longest silence in seconds of a keeper, which sends something each 15 s or more often."""
_ACCEPT_PAUSE_S = 1.0


class PassedEnds(Ends):
    """Descriptors that a stub has passed. Closing them ends the stub."""

    def __init__(self, read_fd: int, write_fd: int, stub: socket.socket) -> None:
        super().__init__(read_fd, write_fd)
        self._stub = stub

    def close(self) -> None:
        super().close()
        self._stub.close()


class LinkRefused(Exception):
    """Refusal of a link. Its client gets the reason.

    `is_unknown`: its session does not exist here. `is_taken`: another client has the pool. `began_again`: the head that
    knew the session was killed, and this one goes on for it.
    """

    def __init__(
        self, reason: str, *, is_unknown: bool = False, is_taken: bool = False, began_again: bool = False
    ) -> None:
        super().__init__(reason)
        self.fields = {
            "reason": reason,
            "is_unknown": is_unknown,
            "is_taken": is_taken,
            "began_again": began_again,
        }


Welcome = Callable[[dict[str, Any], PassedEnds, Callable[[dict[str, Any]], None]], object]
"""Takes a link: HELLO, the link, and a function that sends WELCOME with these facts. Raises LinkRefused."""


class Door:
    """Listener for links.

    Args:
        listener: The socket.
        welcome: Takes links of clients.
        renewed: Called when a keeper renews the lease.
        ended: Called when a keeper ends the head.
        look: Returns what a process may know that only looks. Raises LinkRefused.
    """

    def __init__(
        self,
        listener: socket.socket,
        welcome: Welcome,
        renewed: Callable[[], object],
        ended: Callable[[], object],
        look: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._listener = listener
        self._welcome = welcome
        self._renewed = renewed
        self._ended = ended
        self._look = look
        self._is_closed = False

    def open(self) -> None:
        """Accept links from now on."""
        start_thread(self._accept, name="skyward-door", failed=lambda error: _log.error("head: %s", in_words(error)))

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
                start_thread(partial(self._greet, sock), name="skyward-greeting", failed=partial(_failed, sock))
            except (OSError, MemoryError, RuntimeError):
                if not self._is_closed:  # out of descriptors or threads, perhaps for a moment: the client dials again
                    time.sleep(_ACCEPT_PAUSE_S)

    def _greet(self, stub: socket.socket) -> None:
        deadline = time.monotonic() + _GREETING_S
        ends = PassedEnds(*_passed(stub), stub)
        try:
            os.write(ends.write_fd, MAGIC)
            hello = _hello(ends, deadline)
            if abs(hello["version"] - PROTOCOL_VERSION) > 1:  # a newer client speaks the last two versions
                raise LinkRefused(f"protocol {hello['version']} of the client does not fit protocol {PROTOCOL_VERSION}")
            if hello["role"] == "keeper":
                self._hear(ends)
            elif hello["role"] == "look":
                _send(ends, FrameKind.WELCOME, self._look(hello))
                ends.close()
            else:
                self._welcome(hello, ends, partial(_send, ends, FrameKind.WELCOME))
        except LinkRefused as error:
            with contextlib.suppress(OSError):  # it is gone
                _send(ends, FrameKind.GOODBYE, error.fields)
            ends.close()
        except BaseException:
            ends.close()
            raise

    def _hear(self, keeper: PassedEnds) -> None:
        """Hear a keeper until its link ends."""
        try:
            while True:
                deadline = time.monotonic() + _KEEPER_S
                length, kind, _, _, _ = HEADER.unpack(keeper.read_exactly(HEADER.size, deadline))
                if length > MAX_BODY:
                    raise LinkRefused(f"frame of {length} bytes")
                body = keeper.read_exactly(length, deadline)
                if kind == FrameKind.LEASE:
                    self._renewed()
                elif kind == FrameKind.PING:
                    os.write(keeper.write_fd, pack(FrameKind.PONG, body=body))
                elif kind == FrameKind.SHUTDOWN:
                    self._ended()
                    return
        finally:
            keeper.close()


def _failed(stub: socket.socket, error: BaseException) -> None:
    stub.close()
    if not isinstance(error, OSError | EOFError):  # otherwise the client has gone, and dials again
        _log.error("head: could not take a link: %s", in_words(error))


def _passed(stub: socket.socket) -> tuple[int, int]:
    """Return the two descriptors that a stub passes."""
    stub.settimeout(_GREETING_S)
    parser = FrameParser()
    passed: list[int] = []
    try:
        while len(passed) < 2:
            passed += [frame.fd for frame in receive(stub, parser) if frame.kind == FrameKind.ATTACH]
    except (OSError, ChannelClosed, InternalError) as error:
        for fd in passed:
            os.close(fd)
        raise EOFError(str(error)) from error
    read_fd, write_fd = passed
    return read_fd, write_fd


def _hello(ends: Ends, deadline: float) -> dict[str, Any]:
    length, kind, _, _, _ = HEADER.unpack(ends.read_exactly(HEADER.size, deadline))
    if kind != FrameKind.HELLO or length > MAX_BODY:
        raise LinkRefused(f"frame of kind {kind} instead of HELLO")
    hello: dict[str, Any] = json.loads(ends.read_exactly(length, deadline))
    return hello


def _send(ends: Ends, kind: int, fields: dict[str, Any]) -> None:
    ends.write_exactly(pack(kind, body=json.dumps(fields).encode()), time.monotonic() + _GREETING_S)
