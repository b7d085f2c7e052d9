"""Requests of a worker, or of an operator, to a server. It needs the standard library only, and tries each once."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal
from urllib.parse import urlencode

from ...errors import UsageError
from .addresses import parse_address, token_of_environment
from .frames import ArrayFrame, decode, size_of
from .refusal import RefusalKind, WorkerRefused
from .rounds import UpdateKey

_KINDS = {kind.value: kind for kind in RefusalKind}
SHORT_S = 30.0
"""Deadline of requests without parameters, in seconds."""


class ServerUnreachable(Exception):
    """A server that does not answer, or whose answer broke off. The same request may succeed later."""


class DiLoCoClient:
    """Connection data of a server. Each request has a connection of its own, so any thread may use it.

    Args:
        server_addr: `host:port`, or a URL. Without a scheme it is https if there is a `ca`.
        token: The server's token; None: DILOCO_TOKEN, or the content of the file DILOCO_TOKEN_FILE.
        ca: File with the certificates to trust; None: DILOCO_CA, or those of the system.
        timeout_s: Longest silence of the server in a transfer, in seconds.

    Raises:
        UsageError: The address is not legal, or a file cannot be read.
    """

    def __init__(
        self, server_addr: str, *, token: str | None = None, ca: str | None = None, timeout_s: float = 600.0
    ) -> None:
        ca = ca or os.environ.get("DILOCO_CA") or None
        self._address = parse_address(server_addr, is_encrypted=ca is not None)
        self.name = server_addr
        token = token or token_of_environment()
        self._headers = {"Connection": "close"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        self._timeout_s = timeout_s
        self._ssl: ssl.SSLContext | None = None
        if self._address.is_encrypted:
            try:
                self._ssl = ssl.create_default_context(cafile=ca)
            except OSError as error:
                raise UsageError(f"DILOCO_CA={ca!r}: cannot be read: {error}; name a PEM file") from error

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send JSON, or only ask if there is none, and return the JSON of the answer.

        Raises:
            ServerUnreachable: There was no whole answer.
            WorkerRefused: The server refuses the worker.
            UsageError: The request or the token is wrong.
        """
        content = None if body is None else [memoryview(json.dumps(body).encode())]
        answer = self._request("GET" if body is None else "POST", path, content, timeout_s=SHORT_S)
        decoded = json.loads(answer or b"{}")
        return dict(decoded)

    def parameters(self) -> ArrayFrame | None:
        """Return the parameters of the open round; None if there are none yet. Raises as `ask`."""
        frame = self._request("GET", "/parameters")
        return decode(frame) if frame else None

    def offer(self, pieces: Sequence[memoryview]) -> None:
        """Send parameters for a server that has none. Raises as `ask`."""
        self._request("PUT", "/parameters", pieces)

    def submit(self, key: UpdateKey, session: str, pieces: Sequence[memoryview]) -> None:
        """Send a delta. Raises as `ask`."""
        self._request("PUT", f"/updates?{urlencode({**asdict(key), 'session': session})}", pieces)

    def answer(self, key: UpdateKey, session: str, *, wait_s: float) -> ArrayFrame | Literal["unknown"] | None:
        """Return the answer to an update; None while its round is open, `unknown` if it has to be sent.

        Raises as `ask`.
        """
        query = urlencode({**asdict(key), "session": session, "wait_s": wait_s})
        frame = self._request("GET", f"/answers?{query}")
        return "unknown" if frame is None else decode(frame) if frame else None

    def _request(
        self, method: str, path: str, pieces: Sequence[memoryview] | None = None, *, timeout_s: float | None = None
    ) -> bytearray | None:
        """Return the body of the answer, or None for 404."""
        connection = self._connection(self._timeout_s if timeout_s is None else timeout_s)
        headers = {**self._headers, "Content-Length": str(size_of(pieces))} if pieces is not None else self._headers
        try:
            with contextlib.closing(connection):
                # It may have refused the request before it had read all of it, and said why.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, path, body=None if pieces is None else iter(pieces), headers=headers)
                response = connection.getresponse()
                body = _read(response)
        except ssl.SSLCertVerificationError as error:
            raise UsageError(
                f"server_addr={self.name!r}: its certificate is not trusted: {error.verify_message}; set DILOCO_CA"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(f"{self.name} does not answer: {type(error).__name__}: {error}") from error
        if response.status == 404:
            return None
        if response.status >= 300:
            raise self._failure(response.status, body)
        return body

    def _failure(self, status: int, body: bytearray) -> Exception:
        try:
            refusal = json.loads(body)
            kind, message = str(refusal["kind"]), str(refusal["message"])
        except (ValueError, KeyError, TypeError):
            kind, message = "", bytes(body[:200]).decode("utf-8", "replace")
        if kind in _KINDS:
            return WorkerRefused(_KINDS[kind], message)
        if status >= 500:
            return ServerUnreachable(f"{self.name} failed with HTTP status {status}: {message}")
        return UsageError(message or f"server_addr={self.name!r}: answers HTTP status {status}; is it a DiLoCo server?")

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        address = self._address
        if self._ssl is not None:
            return http.client.HTTPSConnection(address.host, address.port, timeout=timeout_s, context=self._ssl)
        return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)


def _read(response: http.client.HTTPResponse) -> bytearray:
    """Return a whole body, read into memory that tensors can share."""
    if response.length is None:
        return bytearray(response.read())
    body = bytearray(response.length)
    view, at = memoryview(body), 0
    while at < len(body):
        count = response.readinto(view[at:])
        if count == 0:
            raise http.client.IncompleteRead(b"", len(body) - at)
        at += count
    return body
