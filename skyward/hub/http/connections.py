"""Limits of a connection, which uvicorn lacks: a head comes in time and has a size, a body moves, an answer is read.

Without them, a client that sends nothing, or a byte now and then, holds its connection for ever.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .faults import WireError, WireFault

HEAD_BYTES = 64 * 1024
SLOWEST_BYTES = 1024
FILES = 65_536
"""Open files that a server asks for: each connection is one."""


class PatientProtocol(HttpToolsProtocol):
    """A connection that is closed when its client is too slow.

    Args:
        patience_s: Seconds for the head of a request, for the next KiB of its body, and for the client to read more
            of its answer.
        options: Those of uvicorn's protocol.
    """

    def __init__(self, *, patience_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._patience_s = patience_s
        self._has_head = False
        self._is_message_over = False
        self._received = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self._after_patience(self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._body_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_message_over:  # these are the first bytes of a further request
            self._has_head = self._is_message_over = False
            self._received = 0
        super().data_received(data)
        self._received += len(data)
        if not self._has_head:
            # Most heads arrive at once, and need no timer.
            self._head_timer = self._head_timer or self._after_patience(self._give_up)
            if self._received > HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", "head: above 64 KiB", "send fewer headers")
        elif not self._is_message_over and self._body_timer is None:
            self._body_timer = self._after_patience(self._check_body)
            self._received = 0

    def on_headers_complete(self) -> None:
        self._has_head, self._is_message_over = True, False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_message_over = True
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_timer = self._after_patience(self._give_up)

    def resume_writing(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "request: not HTTP", "send a well-formed request")

    def _after_patience(self, callback: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(self._patience_s, callback)

    def _check_body(self) -> None:
        """Close the connection unless its body moves. A body that the hub itself does not read now may rest."""
        if self._received < SLOWEST_BYTES and not self.flow.read_paused:
            self._give_up()
        else:
            self._body_timer = self._after_patience(self._check_body)
            self._received = 0

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def _refuse(self, status: bytes, message: str, fix: str) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(WireFault(WireError("invalid", message, None, fix)))
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()


def allow_connections() -> None:
    """Raise this process's limit of open files as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
