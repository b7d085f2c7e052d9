"""Bodies and queries of requests, read within limits and decoded by their schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from ..model.refusal import Reason, Refusal
from .faults import invalid_body

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MOST_FIELDS = 1000
"""Fields that a query may have."""


class ClientGone(Exception):
    """A connection that ended in the middle of a body. Nobody is left to answer."""


def length_of(headers: Mapping[bytes, bytes], limit: int) -> int | None:
    """Return the announced size of a body, which must not exceed `limit` bytes.

    Raises:
        Refusal: It is larger, or no number.
    """
    text = headers.get(b"content-length")
    if text is None:
        return None
    if not text.isdigit():
        raise Refusal(Reason.INVALID, "content-length: no number; give the size in bytes", field="content-length")
    size = int(text)
    if size > limit:
        raise too_large(limit)
    return size


def too_large(limit: int) -> Refusal:
    return Refusal(Reason.TOO_LARGE, f"body: larger than {limit} bytes; send it in parts", field="body")


async def read(receive: Receive, limit: int) -> bytes:
    """Read a whole body of at most `limit` bytes."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        if len(body) > limit:
            raise too_large(limit)
        return body
    pieces, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)
        message = await receive()


async def stream(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    """Yield a body piece by piece, at most `limit` bytes."""
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        if piece:
            yield piece
        if not message.get("more_body", False):
            return


@cache
def _decoder(schema: type) -> msgspec.json.Decoder[Any]:
    # Not strict, because protobuf's JSON may spell int64 as a string and NaN always is one.
    return msgspec.json.Decoder(schema, strict=False)


@cache
def _list_fields(schema: type) -> frozenset[str]:
    """Names of the fields that take several values in a query."""
    info = msgspec.inspect.type_info(schema)
    assert isinstance(info, msgspec.inspect.StructType)
    names = set()
    for field in info.fields:
        types = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        if any(isinstance(kind, msgspec.inspect.ListType) for kind in types):
            names.add(field.encode_name)
    return frozenset(names)


def decode(body: bytes, schema: type) -> Any:
    """Decode a JSON body.

    Raises:
        Refusal: The body is no JSON or does not fit the schema.
    """
    try:
        try:
            return _decoder(schema).decode(body or b"{}")
        except msgspec.ValidationError as error:
            raise invalid_body(error, msgspec.json.decode(body or b"{}")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal(Reason.INVALID, "body: not JSON; send a JSON object", field="body") from None


def decode_query(query: bytes, schema: type) -> Any:
    """Decode a query string. A field that stands twice is an error, unless it takes a list."""
    lists = _list_fields(schema)
    values: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except ValueError:
        raise Refusal(Reason.INVALID, "query: cannot be decoded; percent-encode it as UTF-8", field="query") from None
    for name, value in pairs:
        if name in lists:
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    try:
        return msgspec.convert(values, schema, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_body(error, values) from None
