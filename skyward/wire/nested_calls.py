"""Calls that tasks make: messages from a slot to the client, which places the calls, and their outcomes.

A message is one payload. It holds other payloads (a function, its arguments, a value) as bytes. The blobs of all of
them travel before the message, under the number of the call and named by content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .blobs import Blob
from .payloads import Encoded, decode, encode
from .tasks import parse, references

IS_NESTED = 1 << 63
"""Bit that is set in the numbers of nested calls and clear in the client's own numbers."""


FIND_ACTOR = -1
"""Kind of a request for the handle of the actor with that name. All other kinds are those of `wire.tasks.CallKind`."""


class NestedCall(NamedTuple):
    """Content of a CALL frame.

    `function` and `arguments` are payloads; `options` and `launch` are pickles, and only a gang has a `launch`.
    `nodes` are the allowed nodes; None allows every node without a role. `is_on_all` makes a gang run on all of them.
    A call of an actor has the number of that actor in its last three fields, see `wire.tasks.actor_place`.
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
    """Content of an OUTCOME frame.

    `status` is "value" (one payload), "values" (one for each item of a list), "ranks" (one for each rank, a list of one
    value), "failed" (the pickled fields of a TaskFailure), "error" (a pickled exception) or "cancelled" (no payload).
    """

    status: str
    payloads: tuple[bytes, ...] = ()


def packed(message: NestedCall | NestedOutcome, blobs: Iterable[Blob]) -> Encoded:
    """Encode the message, with its own blobs and those of the payloads in it, each once."""
    outer = encode(tuple(message), Blob.snapshot)
    by_name = {blob.digest: blob for blob in (*outer.blobs, *blobs)}
    return Encoded(outer.body, tuple(by_name.values()))


def message_of(body: bytes, blobs: Mapping[bytes, Blob]) -> tuple[Any, ...]:
    """Decode the fields of a message without unpickling any of the user's values."""
    fields: tuple[Any, ...] = decode(parse(body), [blobs[digest] for digest, _ in references(body)])
    return fields


def payload_in(body: bytes, blobs: Mapping[bytes, Blob]) -> Encoded:
    """Return a payload of a message together with its blobs."""
    body = bytes(body)
    return Encoded(body, tuple(blobs[digest] for digest, _ in references(body)))
