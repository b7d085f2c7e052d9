"""Transports of requests to a server: the protocol is HTTP's, the way is a transport's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .downloads import Download

SHORT_S = 30.0
"""Deadline of requests without parameters, in seconds."""
UNKNOWN = "unknown"
"""Kind of the answer about a delta that the server does not know."""


class ServerUnreachable(Exception):
    """A server that does not answer, or whose answer broke off. The same request may succeed later."""


class ServerTransport(Protocol):
    """Way of requests to one server. Any thread may use it, and requests do not wait for one another."""

    @property
    def name(self) -> str:
        """Address of the server, for people."""
        ...

    def request(
        self,
        method: str,
        path: str,
        pieces: Sequence[memoryview] | None,
        *,
        timeout_s: float,
        download: Download | None = None,
    ) -> tuple[int, bytearray]:
        """Send one request, and return status and body of its answer.

        Args:
            method: GET, POST or PUT.
            path: Path with its query.
            pieces: Body, sent piece by piece; None: no body.
            timeout_s: Longest silence of the server, in seconds.
            download: Keeps the beginning of a frame that breaks off, for the next request; None: it is lost.

        Raises:
            ServerUnreachable: There was no whole answer.
            UsageError: The server is none that may be used.
        """
        ...
