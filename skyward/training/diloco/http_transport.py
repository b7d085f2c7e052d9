"""Requests by HTTP. Each has a connection of its own. The standard library is all that they need."""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
from collections.abc import Sequence

from ...errors import UsageError
from .addresses import parse_address, token_of_environment
from .downloads import Download, download_for
from .frames import size_of
from .transport import ServerUnreachable


class HTTPTransport:
    """Requests by HTTP to a server that listens.

    Args:
        server_addr: `host:port`, or a URL. Without a scheme it is https if there is a `ca`.
        token: The server's token; None: DILOCO_TOKEN, or the content of the file DILOCO_TOKEN_FILE.
        ca: File with the certificates to trust; None: DILOCO_CA, or those of the system.

    Raises:
        UsageError: The address is not legal, or a file cannot be read.
    """

    def __init__(self, server_addr: str, *, token: str | None = None, ca: str | None = None) -> None:
        ca = ca or os.environ.get("DILOCO_CA") or None
        self._address = parse_address(server_addr, is_encrypted=ca is not None)
        self.name = server_addr
        token = token or token_of_environment()
        self._headers = {"Connection": "close"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        self._ssl: ssl.SSLContext | None = None
        if self._address.is_encrypted:
            try:
                self._ssl = ssl.create_default_context(cafile=ca)
            except OSError as error:
                raise UsageError(f"DILOCO_CA={ca!r}: cannot be read: {error}; name a PEM file") from error

    def request(
        self,
        method: str,
        path: str,
        pieces: Sequence[memoryview] | None,
        *,
        timeout_s: float,
        download: Download | None = None,
    ) -> tuple[int, bytearray]:
        """Send one request; see `ServerTransport`."""
        headers = {**self._headers, "Content-Length": str(size_of(pieces))} if pieces is not None else self._headers
        try:
            with contextlib.closing(self._connection(timeout_s)) as connection:
                # It may have refused the request before it had read all of it, and said why.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, path, body=None if pieces is None else iter(pieces), headers=headers)
                response = connection.getresponse()
                return response.status, _read(response, download)
        except ssl.SSLCertVerificationError as error:
            raise UsageError(
                f"server_addr={self.name!r}: its certificate is not trusted: {error.verify_message}; set DILOCO_CA"
            ) from error
        except (OSError, EOFError, http.client.HTTPException) as error:
            raise ServerUnreachable(
                f"{self.name} does not answer: {type(error).__name__}: {error}; start `skyward diloco serve` there, or "
                "correct the address"
            ) from error

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        address = self._address
        if self._ssl is not None:
            return http.client.HTTPSConnection(address.host, address.port, timeout=timeout_s, context=self._ssl)
        return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)


def _read(response: http.client.HTTPResponse, download: Download | None) -> bytearray:
    if response.length is None:
        return bytearray(response.read())
    tag = response.headers.get("ETag", "").strip('"')
    body = download_for(response.status, download)
    return body.receive(response.readinto, status=response.status, tag=tag, size=response.length)
