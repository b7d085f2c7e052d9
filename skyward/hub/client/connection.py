"""HTTP to a hub: one kept connection, JSON, and errors in words. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, Self
from urllib.parse import quote, urlencode, urlsplit

from ..._version import __version__
from ...errors import HubError, HubUnreachable
from ...node.slot.runtime import current_call
from .settings import Address
from .tunnel import ProgramRequests

PROJECT_HEADER = "X-Skyward-Project"
TIMEOUT_S = 30.0
_PIECE = 1 << 20
_SENT_AT_ONCE = 1 << 17
"""Bytes of a file that are sent at once; 16 KiB, the usual number, take twice the processor time here and in the hub.
The timeout is for each of these pieces, so larger ones would not pass a slow network.
"""
_STALE = (http.client.RemoteDisconnected, http.client.CannotSendRequest, ConnectionError, BrokenPipeError)


class _Response(Protocol):
    """An answer, of `http.client` or through the pool's program."""

    status: int

    def read(self, size: int = ..., /) -> bytes: ...
    def readline(self) -> bytes: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A server-sent event.

    Attributes:
        kind: its name.
        id: place behind it, for a reader that comes back; may be empty.
        body: its JSON.
    """

    kind: str
    id: str
    body: Mapping[str, Any]


class HubConnection:
    """Connection to a hub. Use it from one thread at a time.

    Args:
        address: the hub and the token.
        timeout_s: seconds that one read or write may take.
    """

    def __init__(self, address: Address, *, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        parts = urlsplit(address.url)
        self._is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._path = "" if address.through_program else parts.path  # the program adds it
        self._timeout_s = timeout_s
        # A thread slot's sender has a thread of its own, in which no call is the current one.
        self._call = current_call() if address.through_program else None
        self._http: http.client.HTTPConnection | ProgramRequests | None = None
        self._headers = {"User-Agent": f"skyward/{__version__}"}
        if address.token:
            self._headers["Authorization"] = f"Bearer {address.token}"
        if address.project:
            self._headers[PROJECT_HEADER] = address.project

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next request opens it again."""
        connection, self._http = self._http, None
        if connection is not None:
            connection.close()

    # Requests ---------------------------------------------------------------------------------------------------------

    def json(self, method: str, path: str, body: Any = None, *, query: Mapping[str, Any] | None = None) -> Any:
        """Send a request with a JSON body, or with bytes that are JSON, and return the answer's JSON.

        Raises:
            HubUnreachable: there was no answer.
            HubError: the hub refused the request, or answered with something else than JSON.
        """
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Accept": "application/json"} | ({} if data is None else {"Content-Type": "application/json"})
        with self._answer(method, path, data, headers, query) as response:
            text = response.read()
        try:
            return json.loads(text) if text else {}
        except ValueError as error:
            raise self._not_a_hub(f"{method} {path} was answered with something else than JSON") from error

    def get(self, path: str, *, query: Mapping[str, Any] | None = None, accept: str = "*/*") -> bytes:
        """Return the body of an answer."""
        with self._answer("GET", path, None, {"Accept": accept}, query) as response:
            return response.read()

    def events(self, path: str, *, query: Mapping[str, Any] | None = None) -> Iterator[StreamEvent]:
        """Yield the server-sent events of an answer, until it ends.

        Raises:
            HubUnreachable: there was no answer, or it broke off.
        """
        with self._answer("GET", path, None, {"Accept": "text/event-stream"}, query) as response:
            fields: dict[str, str] = {}
            while line := response.readline():
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name:
                    fields[name] = value
                elif "data" in fields:
                    yield StreamEvent(fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"]))
                    fields = {}

    def download(self, path: str, to: BinaryIO, *, query: Mapping[str, Any] | None = None) -> None:
        """Write the body of an answer to a file.

        Raises:
            OSError: the file cannot be written.
        """
        failure: OSError | None = None
        with self._answer("GET", path, None, {"Accept": "*/*"}, query) as response:
            while failure is None and (piece := response.read(_PIECE)):
                try:
                    to.write(piece)
                except OSError as error:
                    failure = error
                    response.close()
        if failure is not None:
            self.close()
            raise failure

    def upload(self, method: str, path: str, source: BinaryIO, *, query: Mapping[str, Any] | None = None) -> Any:
        """Send a file as the body and return the answer's JSON."""
        size = os.fstat(source.fileno()).st_size
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        with self._answer(method, path, source, headers, query) as response:
            text = response.read()
        return json.loads(text) if text else {}

    def send(self, method: str, path: str, body: bytes, *, query: Mapping[str, Any] | None = None) -> Any:
        """Send bytes as the body and return the answer's JSON."""
        with self._answer(method, path, body, {"Content-Type": "application/octet-stream"}, query) as response:
            text = response.read()
        return json.loads(text) if text else {}

    def exchange(self, method: str, target: str, body: Any, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send a request as it is, and return status and body of the answer, also of a refusal.

        Raises:
            HubUnreachable: there was no answer.
        """
        try:
            response = self._send(method, f"{self._path}{target}", body, {**self._headers, **headers})
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(error) from error

    # Within -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Any, headers: dict[str, str], query: Mapping[str, Any] | None
    ) -> Iterator[_Response]:
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = f"{self._path}{path}{f'?{urlencode(given, doseq=True)}' if given else ''}"
        try:
            response = self._send(method, target, body, {**self._headers, **headers})
            if response.status >= 300:
                raise self._refusal(response.status, response.read(1 << 20), method, path)
            yield response
            response.read()  # so that the connection can be used again
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(error) from error
        except BaseException:
            self.close()
            raise

    def _send(self, method: str, target: str, body: Any, headers: dict[str, str]) -> _Response:
        was_open = self._http is not None
        try:
            return self._try(method, target, body, headers)
        except _STALE:
            # The hub closes a connection that was idle for long. Each request may be repeated: batches are numbered.
            self.close()
            if not was_open:
                raise
            if hasattr(body, "seek"):
                body.seek(0)
            return self._try(method, target, body, headers)

    def _try(self, method: str, target: str, body: Any, headers: dict[str, str]) -> _Response:
        if self._http is None:
            self._http = self._connect()
        try:
            self._http.request(method, target, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            if body is None or getattr(self._http, "sock", self) is None:  # it was not even connected
                raise
            # A hub that refuses a large body answers before it has read it.
            return self._http.getresponse()
        return self._http.getresponse()

    def _connect(self) -> http.client.HTTPConnection | ProgramRequests:
        if self.address.through_program:
            call = current_call() or self._call
            if call is None:
                raise ConnectionError("task: none runs here, so there is no program to go through; name a hub by url=")
            return ProgramRequests(call, self._timeout_s)
        if self._is_https:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, blocksize=_SENT_AT_ONCE, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s, blocksize=_SENT_AT_ONCE)

    def _unreachable(self, error: Exception) -> HubUnreachable:
        return HubUnreachable(
            f"url={self.address.url!r}: the hub does not answer ({_in_words(error)}); check that it runs, and that "
            "the address is right",
            url=self.address.url,
            retryable=True,
        )

    def _refusal(self, status: int, text: bytes, method: str, path: str) -> HubError:
        try:
            answer = json.loads(text)
            error = answer.get("error", answer)
            message, code = str(error.get("message", "")), str(error.get("code") or error.get("error_code") or "")
            field = str(error.get("field") or "")
            message = "; ".join(part for part in (message, str(error.get("fix") or "")) if part)
        except (ValueError, AttributeError):
            message = code = field = ""
        if not message:
            return self._not_a_hub(f"{method} {path} was answered with status {status}", status)
        return HubError(
            message, url=self.address.url, status=status, code=code, field=field, retryable=status in RETRIED
        )

    def _not_a_hub(self, problem: str, status: int | None = None) -> HubError:
        return HubError(
            f"url={self.address.url!r}: {problem}; check that a hub listens there",
            url=self.address.url,
            status=status,
            retryable=status in RETRIED,
        )


RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that pass by themselves."""


def path_of(*parts: str) -> str:
    """Return a path of the API whose parts are quoted; slashes within the last one are kept."""
    *first, last = parts
    return "/" + "/".join([*(quote(part, safe="") for part in first), quote(last, safe="/")])


def _in_words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return text or type(error).__name__
