"""The bodies of task frames, read by client, agent and slot.

    TASK | function digest 16 | mode u8 | call kind u8 | input streams u16 | number u32 | part u16 | parts u16
         | first node u16 | payload ... |

`number` is the first index of a chunk, or the items of credit that a stream starts with. `part` of `parts` is the place
of a broadcast among the nodes that it was sent to, and `first node` the number of the first of them.

The payload of any frame:

    | flags u8 | blobs u16 | elapsed_ns u64 | (digest 16, size u64) * blobs | pickle ... |

`payloads` pickles. The agent reads the references only, and does not import it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

from ..values.topology import AcceleratorInfo, Peer, Rank

__all__ = [
    "CallKind",
    "HEAD",
    "IN_MEMORY",
    "InputStream",
    "Mode",
    "NodeConfig",
    "PICKLE_IS_BLOB",
    "Parsed",
    "REFERENCE",
    "RankOrder",
    "TASK_HEAD",
    "TASK_KIND_AT",
    "TaskHead",
    "Topology",
    "pack_task",
    "parse",
    "references",
    "unpack_task",
]


TASK_HEAD = struct.Struct("<16sBBHIHHH")
TASK_KIND_AT = 17
"""Offset of the call kind in the body."""


class CallKind(IntEnum):
    PLAIN = 0
    BROADCAST = 1
    GANG = 2


class Mode(IntEnum):
    CALL = 0  # payload: (args, kwargs)
    CHUNK = 1  # payload: (items, star, return_exceptions, nanoseconds after which no further call is begun, or None)
    STREAM = 2  # payload: (args, kwargs); the function is a generator function


class TaskHead(NamedTuple):
    function: bytes
    mode: int
    kind: int
    inputs: int
    number: int
    part: int = 0
    parts: int = 1
    first_node: int = 0


def pack_task(head: TaskHead, payload: bytes) -> bytes:
    return TASK_HEAD.pack(*head) + payload


def unpack_task(body: bytes) -> TaskHead:
    return TaskHead(*TASK_HEAD.unpack_from(body))


@dataclass(frozen=True, slots=True)
class InputStream:
    """Stands in the arguments for an iterator that the client feeds; `lane` is its number among the arguments."""

    lane: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The pool as the client knows it once all nodes have said who they are."""

    job_id: str
    node: int
    peers: tuple[Peer, ...]
    accelerators: tuple[int, ...]
    """Of each node, by index."""
    accelerator: AcceleratorInfo | None = None
    """This node's own."""
    interface: str = ""
    initializer: bytes | None = None
    """Pickled (function, args), run once in each slot process before its first task."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What an agent is told when it is started. `lease_s`: seconds without a sign of the keeper until it ends."""

    pool: str
    node: int
    folder: str
    slots: int
    executor: Literal["process", "thread"] = "process"
    python: str
    path: tuple[str, ...]
    """The slots' sys.path."""
    cwd: str
    env: tuple[tuple[str, str], ...] = field(repr=False)
    """The whole environment of the user's processes. Holds secrets in clear."""
    cores: int = 1
    """That the node's processes share."""
    thread_variables: tuple[str, ...] = ()
    """Those of `env` that give a slot its part of the cores: the user has set none of them."""
    preload: tuple[str, ...] = ()
    """Modules imported once, before the slots are forked."""
    address: str = "127.0.0.1"
    interface: str = ""
    lease_s: float = 5.0
    lease_file: str = ""
    """Touched whenever the lease is renewed, for who watches over the whole machine; empty: there is nobody."""
    notice_file: str = ""
    """Is there once the provider has announced that it takes the machine back; empty: it never does."""
    cancel_grace_s: float = 3.0
    log_limit_bytes: int = 1 << 20
    blob_limit_bytes: int = 0
    """In memory; the rest is spilled to `folder`. 0: a quarter of the machine's."""


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """A new process for one rank of a gang. `launch` is the pickled Launch; loading it imports no framework."""

    rank: Rank
    launch: bytes
    preload: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = field(default=())
    """Beyond the node's environment; set before anything is imported."""
    tell_stopped_after_s: float = 300.0
    """Seconds for which the rank's main thread has not run, after which the client wants to know."""


HEAD = struct.Struct("<BHQ")
REFERENCE = struct.Struct("<16sQ")
PICKLE_IS_BLOB = 0x01
"""Flag: the last blob is the pickle itself, which was too large for a frame."""

IN_MEMORY = 0x02
"""Flag: the buffers are in the sender's memory, and the digests say where (see `pull`)."""


class Parsed(NamedTuple):
    """A payload as it came: nothing is unpickled yet."""

    elapsed_ns: int
    references: tuple[tuple[bytes, int], ...]
    pickle: memoryview
    pickle_is_blob: bool
    is_in_memory: bool = False


def references(body: bytes, start: int = 0) -> tuple[tuple[bytes, int], ...]:
    """(digest, size) of each blob that the payload at `start` needs."""
    _, count, _ = HEAD.unpack_from(body, start)
    if not count:
        return ()
    first = start + HEAD.size
    return tuple(REFERENCE.iter_unpack(memoryview(body)[first : first + count * REFERENCE.size]))


def parse(body: bytes, start: int = 0) -> Parsed:
    flags, count, elapsed_ns = HEAD.unpack_from(body, start)
    if not count:
        return Parsed(elapsed_ns, (), memoryview(body)[start + HEAD.size :], False)
    names = references(body, start)
    at = start + HEAD.size + count * REFERENCE.size
    return Parsed(elapsed_ns, names, memoryview(body)[at:], bool(flags & PICKLE_IS_BLOB), bool(flags & IN_MEMORY))
