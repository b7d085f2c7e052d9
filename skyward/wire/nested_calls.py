"""Calls that tasks make: messages from a slot to the client, which places the calls, and their outcomes.

A message is one payload. It holds other payloads (a function, its arguments, a value) as bytes. The blobs of all of
them travel before the message, under the number of the call and named by content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from .blobs import Blob
from .payloads import Encoded, decode, encode
from .tasks import parse, references

IS_NESTED = 1 << 63
"""Bit that is set in the numbers of nested calls and clear in the client's own numbers."""


class TaskRequest(IntEnum):
    """Requests of a task that are no calls, in place of the kind of a call."""

    FIND_ACTOR = 16  # name: that of an actor, whose handle is to come
    PUT = 17  # arguments: a payload whose blobs stay on the node of the task
    GET = 18  # arguments: digests of blobs, whose bytes are to come
    BRING = 19  # as GET; but the node of the task gets the bytes that come straight from another node


class NestedCall(NamedTuple):
    """Content of a CALL frame.

    `function` and `arguments` are payloads; `options` are those of `calls.named_options`. Only a gang has a `launch`,
    a pickle, and a pickle of its facts, for a process without the integrations (`values.launch.LaunchFacts`).
    `nodes` are the allowed nodes; None allows every node without a role. `is_on_all` makes a gang run on all of them.
    A call of an actor has the number of that actor in its last three fields, see `wire.tasks.actor_place`.
    A payload may refer to blobs that the task has references to; these do not travel. `is_kept`: the value stays.
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
    is_kept: bool = False
    launch_facts: bytes = b""


class NestedOutcome(NamedTuple):
    """Content of an OUTCOME frame.

    `status` is "value" (one payload), "values" (one for each item of a list), "ranks" (one for each rank, a list of one
    value), "failed" (the pickled fields of a TaskFailure, and notes), "error" (a pickled exception) or
    "cancelled" (no payload). A GET has "blobs" and no payload: its bytes come as blobs.

    `is_held`: it has references, whose blobs do not travel. They stay until UNCALL, or the end of the task.
    """

    status: str
    payloads: tuple[bytes, ...] = ()
    is_held: bool = False


def packed(message: NestedCall | NestedOutcome, blobs: Iterable[Blob]) -> Encoded:
    """Encode the message, with its own blobs and those of the payloads in it, each once."""
    outer = encode(tuple(message), Blob.snapshot)
    by_name = {blob.digest: blob for blob in (*outer.blobs, *blobs)}
    return Encoded(outer.body, tuple(by_name.values()))


def message_of(body: bytes, blobs: Mapping[bytes, Blob]) -> tuple[Any, ...]:
    """Decode the fields of a message without unpickling any of the user's values."""
    fields: tuple[Any, ...] = decode(parse(body), [blobs[digest] for digest, _ in references(body)])
    return fields


def payload_in(body: bytes, blobs: Mapping[bytes, Blob], absent: Callable[[bytes, int], Blob]) -> Encoded:
    """Return a payload of a message together with its blobs. `absent` makes those that did not travel, by name."""
    body = bytes(body)
    return Encoded(body, tuple(blobs.get(digest) or absent(digest, size) for digest, size in references(body)))
