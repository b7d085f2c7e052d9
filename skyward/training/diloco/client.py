"""Requests of a worker, or of an operator, to a server, by either transport. Each is tried once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal
from urllib.parse import urlencode

from ...errors import UsageError
from .downloads import Download
from .frames import ArrayFrame, decode, pieces_from
from .http_transport import HTTPTransport
from .pool_transport import SCHEME, PoolTransport
from .refusal import RefusalKind, WorkerRefused
from .rounds import UpdateKey
from .transport import SHORT_S, UNKNOWN, ServerTransport, ServerUnreachable

_KINDS = {kind.value: kind for kind in RefusalKind}


class DiLoCoClient:
    """Requests to one server. Any thread may use it.

    Args:
        server_addr: `host:port` or a URL, or `pool://NAME` for a server in the program of this task's pool.
        token: The server's token; None: DILOCO_TOKEN, or the content of the file DILOCO_TOKEN_FILE.
        ca: File with the certificates to trust; None: DILOCO_CA, or those of the system.
        timeout_s: Longest silence of the server in a transfer, in seconds.

    Raises:
        UsageError: The address is not legal, or a file cannot be read.
    """

    def __init__(
        self, server_addr: str, *, token: str | None = None, ca: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self._transport: ServerTransport
        if server_addr.startswith(SCHEME):
            self._transport = PoolTransport(server_addr)
        else:
            self._transport = HTTPTransport(server_addr, token=token, ca=ca)
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """Address of the server, for people."""
        return self._transport.name

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send JSON, or only ask if there is none, and return the JSON of the answer.

        Raises:
            ServerUnreachable: There was no whole answer.
            WorkerRefused: The server refuses the worker.
            UsageError: The request or the token is wrong.
        """
        content = None if body is None else [memoryview(json.dumps(body).encode())]
        answer = self._request("GET" if body is None else "POST", path, content, timeout_s=SHORT_S)
        try:
            return dict(json.loads(answer or b"{}"))
        except (ValueError, TypeError):
            raise UsageError(f"server_addr={self.name!r}: its answer is no JSON object; name a DiLoCo server") from None

    def parameters(self, worker: str = "", *, download: Download | None = None) -> ArrayFrame | None:
        """Return the parameters of the open round; None if there are none yet. Raises as `ask`.

        Args:
            worker: Worker whose traffic they are; empty: none.
            download: Keeps the beginning of a frame that breaks off, and a later call goes on with it.
        """
        query = ({"worker": worker} if worker else {}) | _rest(download)
        frame = self._request("GET", f"/parameters?{urlencode(query)}", download=download)
        return decode(frame) if frame else None

    def offer(self, pieces: Sequence[memoryview]) -> None:
        """Send parameters for a server that has none. Raises as `ask`."""
        self._request("PUT", "/parameters", pieces)

    def submit(
        self, key: UpdateKey, session: str, pieces: Sequence[memoryview], *, upload: str = "", offset: int = 0
    ) -> None:
        """Send a delta. Raises as `ask`.

        Args:
            key: Key of the update.
            session: Session of the worker's process.
            pieces: The frame.
            upload: Name of exactly these bytes. If the connection breaks, a later call goes on where it broke.
            offset: Bytes of it that the server has, by `received`.
        """
        query = {**asdict(key), "session": session, "upload": upload, "offset": offset}
        if self._request("PUT", f"/updates?{urlencode(query)}", pieces_from(pieces, offset)) is None and offset:
            self.submit(key, session, pieces, upload=upload)

    def received(self, key: UpdateKey, session: str, *, upload: str = "") -> int | None:
        """Return the bytes of an upload that the server has; None if it knows the whole delta. Raises as `ask`."""
        query = {**asdict(key), "session": session, "upload": upload}
        answer = self.ask(f"/updates?{urlencode(query)}")
        return None if answer["is_known"] else int(answer["received"])

    def answer(
        self, key: UpdateKey, session: str, *, wait_s: float, download: Download | None = None
    ) -> ArrayFrame | Literal["unknown"] | None:
        """Return the answer to an update; None while its round is open, `unknown` if it has to be sent.

        Raises as `ask`. `download` is as for `parameters`.
        """
        query = {**asdict(key), "session": session, "wait_s": wait_s} | _rest(download)
        frame = self._request("GET", f"/answers?{urlencode(query)}", download=download)
        return "unknown" if frame is None else decode(frame) if frame else None

    def _request(
        self,
        method: str,
        path: str,
        pieces: Sequence[memoryview] | None = None,
        *,
        timeout_s: float | None = None,
        download: Download | None = None,
    ) -> bytearray | None:
        """Return the body of the answer, or None for something that the server does not know."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        status, body = self._transport.request(method, path, pieces, timeout_s=timeout_s, download=download)
        if status < 300:
            return body
        try:
            refusal = json.loads(body)
            kind, message = str(refusal["kind"]), str(refusal["message"])
        except (ValueError, KeyError, TypeError):
            raise self._stranger(status) from None
        if status == 404 and kind == UNKNOWN:
            return None
        raise self._failure(status, kind, message)

    def _failure(self, status: int, kind: str, message: str) -> Exception:
        if kind in _KINDS:
            return WorkerRefused(_KINDS[kind], message)
        if status >= 500 or status == 429:
            return ServerUnreachable(f"{self.name} failed with HTTP status {status}: {message}; see its log")
        return UsageError(message)

    def _stranger(self, status: int) -> Exception:
        """Return the error for an answer that is not in a DiLoCo server's form."""
        if status >= 500:  # a proxy whose server is away, or an error of the server
            return ServerUnreachable(f"{self.name} failed with HTTP status {status}; see its log")
        return UsageError(
            f"server_addr={self.name!r}: answers HTTP status {status}, as no DiLoCo server does; correct the address"
        )


def _rest(download: Download | None) -> dict[str, Any]:
    return {} if download is None else download.query
