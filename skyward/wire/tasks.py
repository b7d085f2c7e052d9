"""Bodies of task frames, read by client, agent and slot.

    TASK | function digest 16 | mode u8 | call kind u8 | input streams u16 | number u32 | part u16 | parts u16
         | first node u16 | payload ... |

`number` is the first index of a chunk, or the initial credit of a stream in items. `part` of `parts` is a broadcast's
place among its nodes, and `first node` is the number of the first of them. A call of an actor has the actor's number
in these three fields instead.

The payload of any frame is:

    | flags u8 | blobs u16 | elapsed_ns u64 | (digest 16, size u64) * blobs | pickle ... |

`payloads` does the pickling. The agent reads only the references, so it does not import `payloads`.
"""

from __future__ import annotations

import struct
from dataclasses import field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..core.records import dataclass
from ..values.devices import Grant
from ..values.topology import AcceleratorInfo, Peer, Rank

if TYPE_CHECKING:  # agents of pools without volumes start sooner
    from ..values.volume import PlacedVolume, Volume

SOCKET_NAME = "agent.sock"
"""Name of an agent's socket in the folder of its node."""

TASK_HEAD = struct.Struct("<16sBBHIHHH")
TASK_KIND_AT = 17
"""Offset of the call kind in the body."""


_NO_INPUTS = bytes(2)


class CallKind(IntEnum):
    PLAIN = 0
    BROADCAST = 1
    GANG = 2
    ACTOR = 3


class Mode(IntEnum):
    CALL = 0  # payload: (args, kwargs)
    # Payload: (items, star, return_exceptions, nanoseconds after which no new call starts, or None); the results are
    # (index of the first, results). Items and results that are numbers may be packed, see `numbers`.
    CHUNK = 1
    STREAM = 2  # payload: (args, kwargs); the function is a generator function
    KEEP = 3  # as CALL, but the large buffers of the value stay on the node


class TaskHead(NamedTuple):
    function: bytes
    mode: int
    kind: int
    inputs: int
    number: int
    part: int = 0
    parts: int = 1
    first_node: int = 0

    @property
    def actor(self) -> int:
        """Number of the actor that runs the task, if it is for one."""
        return self.part | self.parts << 16 | self.first_node << 32


def actor_place(actor: int) -> tuple[int, int, int]:
    """Return the last three fields of a head for a call of an actor."""
    return actor & 0xFFFF, actor >> 16 & 0xFFFF, actor >> 32 & 0xFFFF


def pack_task(head: TaskHead, payload: bytes) -> bytes:
    return TASK_HEAD.pack(*head) + payload


def unpack_task(body: bytes) -> TaskHead:
    return TaskHead(*TASK_HEAD.unpack_from(body))


def is_plain(body: bytes) -> bool:
    """Return whether a task streams nothing, in less time than `unpack_task`."""
    return body[16] != Mode.STREAM and body[18:20] == _NO_INPUTS


@dataclass(frozen=True, slots=True)
class InputStream:
    """Placeholder in the arguments for an iterator that the client feeds. `lane` numbers the iterators of a call."""

    lane: int


@dataclass(frozen=True, slots=True)
class RaisedItem:
    """An exception among the results of a chunk."""

    failure: bytes
    """Pickled EncodedFailure."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Pool as the client knows it once all nodes have introduced themselves. It is sent again when nodes come or go."""

    job_id: str
    node: int
    peers: tuple[Peer | None, ...]
    """Peers by node number; None for a node that is not there."""
    accelerators: tuple[int, ...]
    """Number of accelerators of each node, by node number."""
    accelerator: AcceleratorInfo | None = None
    """Accelerators of this node."""
    interface: str = ""
    initializer: bytes | None = None
    """Pickled (function, args) that each slot process runs once before its first task."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Configuration of an agent. It ends after `lease_s` seconds without a sign of the keeper or its starter."""

    pool: str
    node: int
    folder: str
    slots: int
    executor: Literal["process", "thread"] = "process"
    python: str
    path: tuple[str, ...]
    """sys.path of the slots."""
    cwd: str
    env: tuple[tuple[str, str], ...] = field(repr=False)
    """Complete environment of the user's processes. Holds secrets in clear text."""
    cores: int = 1
    """Number of cores that the node's processes share."""
    memory_gib: float = 0.0
    """Memory that the node's processes share; 0: that of the machine."""
    thread_variables: tuple[str, ...] = ()
    """Variables of `env` that limit a slot to its share of the cores, except those that the user has set."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before the slots are forked."""
    forks_zygote: bool = False
    """Whether the agent's process was started as slots need it (`python`, `env`, `cwd`, `path`), and may fork them."""
    address: str = "127.0.0.1"
    interface: str = ""
    lease_s: float = 5.0
    starter: int = 0
    """Process on this machine that keeps the agent's stdout open for its life; 0: none. A node that no keeper has
    contacted ends with this process: by itself at once, or killed after `lease_s`."""
    lease_file: str = ""
    """File that is touched at each renewal of the lease, for a watchdog of the whole machine; empty: none."""
    ends_machine: bool = False
    """Whether the machine powers itself off when the node ends, because its client may not be there to end it."""
    notice_file: str = ""
    """File that appears once the provider has announced to take the machine back; empty: it never does."""
    cancel_grace_s: float = 3.0
    volumes: tuple[tuple[str, Volume], ...] = ()
    """Volumes by the paths that the user wrote."""
    links_volumes: bool = False
    """Whether the node makes links at those paths. Not on the user's own machine."""
    placed_volumes: tuple[PlacedVolume, ...] = ()
    """Volumes with their folders. The agent sets it."""
    log_limit_bytes: int = 1 << 20
    blob_limit_bytes: int = 0
    """Most bytes of blobs in memory; the rest is spilled to `folder`. 0: a quarter of the machine's memory, for
    a node that has the machine to itself."""

    @property
    def socket_path(self) -> str:
        """Path of the agent's socket."""
        return f"{self.folder}/{SOCKET_NAME}"


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """Order to start a process for one rank of a gang. Unpickling `launch` (a Launch) imports no framework."""

    rank: Rank
    launch: bytes
    preload: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = field(default=())
    """Variables beyond the node's environment, set before anything is imported."""
    grant: Grant | None = None
    """Part of the node that the rank may use; None: its equal share of everything."""
    shared_as: str = ""
    """Name under which the ranks of the gang on this node share the limits of the grant."""
    visible: tuple[int, ...] | None = None
    """Devices that its process sees, in the order in which it counts them; None: those of the grant alone."""
    tell_stopped_after_s: float = 300.0
    """Seconds without progress of the rank's main thread after which the agent notifies the client."""
    note: tuple[Any, ...] = ()
    """Facts about the gang for the next head, if this one is lost. The agent only keeps them."""


@dataclass(frozen=True, kw_only=True)
class ActorOrder:
    """Order to start a process for an actor."""

    lanes: int = 1
    """Calls that run at once. With more than one, they run in threads."""
    grant: Grant | None = None
    """Part of the node that its process may use; None: all devices."""


HEAD = struct.Struct("<BHQ")
REFERENCE = struct.Struct("<16sQ")
PICKLE_IS_BLOB = 0x01
"""Flag: the last blob is the pickle itself, because it was too large for a frame."""

IN_MEMORY = 0x02
"""Flag: the buffers are in the sender's memory, at the addresses in place of the digests (see `pull`)."""


class Parsed(NamedTuple):
    """Parts of a payload, not yet unpickled."""

    elapsed_ns: int
    references: tuple[tuple[bytes, int], ...]
    pickle: memoryview
    pickle_is_blob: bool
    is_in_memory: bool = False


def references(body: bytes, start: int = 0) -> tuple[tuple[bytes, int], ...]:
    """Return (digest, size) of each blob that the payload at `start` needs."""
    _, count, _ = HEAD.unpack_from(body, start)
    if not count:
        return ()
    first = start + HEAD.size
    return tuple(REFERENCE.iter_unpack(memoryview(body)[first : first + count * REFERENCE.size]))


def elapsed_ns(body: bytes) -> int:
    """Return the duration in the payload of a result."""
    return int.from_bytes(body[3:11], "little")


def has_references(body: bytes) -> bool:
    """Return whether a payload needs blobs, or buffers in its sender's memory. Raises struct.error if it is none."""
    _, count, _ = HEAD.unpack_from(body)
    return bool(count)


def is_in_memory(body: bytes) -> bool:
    """Return whether the buffers of a payload are in its sender's memory."""
    return bool(body[0] & IN_MEMORY)


def without_memory(body: bytes) -> bytes:
    """Return a payload whose buffers are here, although they were in its sender's memory."""
    return bytes((body[0] & ~IN_MEMORY,)) + body[1:]


def parse(body: bytes, start: int = 0) -> Parsed:
    flags, count, elapsed_ns = HEAD.unpack_from(body, start)
    if not count:
        return Parsed(elapsed_ns, (), memoryview(body)[start + HEAD.size :], False)
    names = references(body, start)
    at = start + HEAD.size + count * REFERENCE.size
    return Parsed(elapsed_ns, names, memoryview(body)[at:], bool(flags & PICKLE_IS_BLOB), bool(flags & IN_MEMORY))
