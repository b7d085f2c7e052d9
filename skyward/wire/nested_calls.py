"""Calls that tasks make: what goes from a slot to the client, which places them, and what comes back.

A message is one payload. The bodies of other payloads (a function, its arguments, a value) lie in it as bytes, and the
blobs of all of them travel before it under the number of the call, named by content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .blobs import Blob
from .payloads import Encoded, decode, encode
from .tasks import parse, references

__all__ = ["IS_NESTED", "NestedCall", "NestedOutcome", "message_of", "packed", "payload_in"]

IS_NESTED = 1 << 63
"""Bit of the number of such a call: the client's own numbers have it not."""


class NestedCall(NamedTuple):
    """CALL. `function` and `arguments` are payloads, `options` and `launch` pickled; `launch` is empty but for a gang.

    nodes: those that it may go to; None: any that is kept for no role. is_on_all: a gang on all of those.
    """

    parent: int
    name: str
    function: bytes
    arguments: bytes
    options: bytes
    launch: bytes
    kind: int
    nodes: tuple[int, ...] | None
    is_on_all: bool = False
    part: int = 0
    parts: int = 1
    first_node: int = 0


class NestedOutcome(NamedTuple):
    """OUTCOME. status: "value" (one payload), "values" (one for each node), "failed" (a pickled TaskFailure's fields),
    "error" (a pickled exception), "cancelled".
    """

    status: str
    payloads: tuple[bytes, ...] = ()


def packed(message: NestedCall | NestedOutcome, blobs: Iterable[Blob]) -> Encoded:
    """The message with its own blobs and those of the payloads in it, each once."""
    outer = encode(tuple(message), Blob.snapshot)
    by_name = {blob.digest: blob for blob in (*outer.blobs, *blobs)}
    return Encoded(outer.body, tuple(by_name.values()))


def message_of(body: bytes, blobs: Mapping[bytes, Blob]) -> tuple[Any, ...]:
    """The fields of the message. Nothing of the user's is unpickled."""
    fields: tuple[Any, ...] = decode(parse(body), [blobs[digest] for digest, _ in references(body)])
    return fields


def payload_in(body: bytes, blobs: Mapping[bytes, Blob]) -> Encoded:
    """A payload that lay in a message."""
    body = bytes(body)
    return Encoded(body, tuple(blobs[digest] for digest, _ in references(body)))
