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

_OTHER_NAMES = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH. Source: OpenSSL, x509_vfy.h."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""Reasons of OpenSSL for an answer that is not TLS, by its version."""


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
        if token is not None and not token.isprintable():
            raise UsageError("token: has a line break or another control character; set DILOCO_TOKEN to one line")
        self._headers = {"Connection": "close"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        self._ssl: ssl.SSLContext | None = None
        if self._address.is_encrypted:
            try:
                self._ssl = ssl.create_default_context(cafile=ca)
            except OSError as error:
                raise UsageError(
                    f"DILOCO_CA={ca!r}: cannot be read: {error}; name a PEM file with the server's certificate"
                ) from error
        self._ca = ca

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
            what_next = "set DILOCO_CA to a file with it" if self._ca is None else "copy the server's certificate there"
            if error.verify_code in _OTHER_NAMES:
                what_next = "use a name that is in it"
            trusted = "" if self._ca is None else f" by DILOCO_CA={self._ca!r}"
            raise UsageError(
                f"server_addr={self.name!r}: its certificate is not trusted{trusted}: "
                f"{error.verify_message.rstrip('.')}; {what_next}"
            ) from error
        except (OSError, EOFError, http.client.HTTPException) as error:
            raise ServerUnreachable(
                f"{self.name} does not answer: {type(error).__name__}: {error}; {self._advice(error)}"
            ) from error

    def _advice(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
            return "it has no certificate, so use http:// to a loopback address, or start it with --cert"
        if isinstance(error, http.client.RemoteDisconnected) and self._ssl is None:
            return "start it again if it has ended, or use https:// if it has a certificate"
        return "start `skyward diloco serve` there, or correct the address"

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
