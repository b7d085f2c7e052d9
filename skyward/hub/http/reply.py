"""Replies that are not one JSON value: files, streams, and answers with headers of their own."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import msgspec

JSON = b"application/json"


class Empty(msgspec.Struct):
    """Answer `{}`, and the request of routes that take no fields."""


class Bytes:
    """Marker in the table of routes: raw bytes as body, read or written as a stream."""


class Document:
    """Marker in the table of routes: an answer of JSON whose fields are described elsewhere."""


class ServerSentEvents:
    """Marker in the table of routes: an answer of server-sent events."""


class Text:
    """Marker in the table of routes: an answer of plain text or HTML."""


@dataclass(slots=True)
class HttpReply:
    """An answer whose status, headers or body the handler chose.

    Attributes:
        body: The whole body, or a generator of its pieces, which is closed at the end.
    """

    body: bytes | AsyncGenerator[bytes, None] = b""
    status: int = 200
    content_type: bytes = JSON
    headers: Mapping[bytes, bytes] = field(default_factory=dict)


def number(value: float) -> float | str:
    """Spell a float. JSON has no number for those that are not finite, so they are texts, as in protobuf's JSON."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
