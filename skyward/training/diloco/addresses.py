"""Addresses and tokens of servers: where they come from, and which may be used without encryption."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from ...errors import UsageError
from ..control.server import is_loopback

FIRST_PORT = 8512
"""Port of a server; the next 99 follow if it is taken."""
TOKEN_FILE = "token"
"""Name of the file with the token, in the folder of a server's saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAddress:
    """Where a server listens."""

    host: str
    port: int
    is_encrypted: bool


def parse_address(text: str, *, is_encrypted: bool = False) -> ServerAddress:
    """Return the address that a text names.

    Args:
        text: `host:port`, `http://host:port` or `https://host:port`.
        is_encrypted: Whether an address without a scheme means https.

    Raises:
        UsageError: The text names no address, or one on another machine without encryption.
    """
    url = text if "://" in text else f"{'https' if is_encrypted else 'http'}://{text}"
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if not host or port is None or scheme not in ("http", "https"):
        raise UsageError(f"server_addr={text!r}: names no server; use host:port, or https://host:port")
    if scheme == "http" and not is_loopback(host):
        raise UsageError(
            f"server_addr={text!r}: would send token and parameters without encryption; "
            "use https://, or `ssh -L` to a port of this machine"
        )
    return ServerAddress(host=host, port=port, is_encrypted=scheme == "https")


def page_link(server_addr: str, token: str | None) -> str:
    """Return the address of a server's page. Its fragment, which browsers do not send, has the token.

    Example:
        >>> page_link("127.0.0.1:8512", "a+b")
        'http://127.0.0.1:8512/#token=a%2Bb'
    """
    address = parse_address(server_addr, is_encrypted=bool(os.environ.get("DILOCO_CA")))
    host = f"[{address.host}]" if ":" in address.host else address.host
    fragment = "" if token is None else f"#token={quote(token, safe='')}"
    return f"{'https' if address.is_encrypted else 'http'}://{host}:{address.port}/{fragment}"


def token_of_environment() -> str | None:
    """Return the token that DILOCO_TOKEN has, or the file that DILOCO_TOKEN_FILE names.

    Raises:
        UsageError: The file cannot be read.
    """
    token = os.environ.get("DILOCO_TOKEN")
    path = os.environ.get("DILOCO_TOKEN_FILE")
    if token or not path:
        return token or None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"DILOCO_TOKEN_FILE={path!r}: cannot be read: {error}; name a file with the token") from error
