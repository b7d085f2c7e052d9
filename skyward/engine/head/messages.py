"""Messages between a client and its head: the content of the frames that only these two exchange.

Everything in them is plain data, or bytes that the head passes on unread: payloads, functions, failures. A task has one
number, in the client, on the head and on its node. Those of the client are even, and those of the head are odd.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import field
from typing import Any, NamedTuple

from ...core.records import dataclass
from ...values.launch_facts import LaunchFacts
from .plain import dump_plain, load_plain

_LENGTH = struct.Struct("<I")
_KNOWN = 256
"""Messages to remember. Most calls differ only in their arguments."""
_SHORT = 4096
"""Most bytes of a message that is remembered."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Configuration of a head. It ends after `lease_s` seconds without its client and keeper."""

    pool: str
    cancel_grace_s: float
    folder: str = ""
    """Private folder, which the head makes and removes."""
    lease_s: float = 0.0
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Values that lines of output must not show."""
    initializer: bytes | None = None
    kept: frozenset[int] = frozenset()
    default_timeout_s: float | None = None
    direct_transfers: bool = True
    transfer_keys: tuple[str, str] | None = field(default=None, repr=False)
    """Certificate and key that encrypt what goes from node to node; see `engine.transfers`."""
    starter: int = 0
    """Process on this machine that holds the head's standard input for its life; 0: none, a watchdog has the lease."""
    node_folder: str = ""
    """Folder of the node on the same machine, whose agent the head reaches without its client; empty: there is none."""
    detached_for_s: float = 0.0
    """Seconds that a detached pool goes on without a client. 0: the pool is not detached, and ends with its client."""
    warning_s: float = 600.0
    """Seconds before the end of a detached pool at which it warns."""
    attach_key: str = field(default="", repr=False)
    """Secret by which another client of a detached pool proves that it may attach."""
    heads_before: int = 0
    """Number of the pool's heads that are gone. The client sends their open calls again; see `taken_up`."""
    lost_things: tuple[tuple[str, str], ...] = ()
    """Kinds and names of the shared state that they had."""
    blueprint: bytes = field(default=b"", repr=False)
    """What it takes to build a node of a detached pool, for clients that attach; see `pool.blueprint`. Never written
    to a file."""
    lease_file: str = ""
    """File on a rented machine: text in it powers the machine off. Empty: the machine goes on after the pool."""


class CallMessage(NamedTuple):
    """Content of a CALL frame, before the payload of the arguments.

    `function` is the digest of a function that was sent before, and `options` are those of
    `calls.named_options`. A gang has a `gang`, and no `calls` or `handles_loss`.
    """

    name: str
    function: bytes
    head: tuple[Any, ...]
    options: bytes
    nodes: tuple[int, ...] | None
    timeout_s: float | None = None
    expected_ns: float | None = None
    may_move: bool = True
    handles_loss: bool = False
    calls: int = 1
    in_bulk: bool = True
    after_s: float = 0.0
    gang: GangMessage | None = None

    @property
    def may_go_to(self) -> tuple[int, ...] | None:
        """Nodes that may run it; None: any."""
        return self.gang.some_of if self.nodes is None and self.gang is not None else self.nodes


class GangMessage(NamedTuple):
    """Fields of a gang beyond those of a call."""

    launch: LaunchFacts
    launch_bytes: bytes
    some_of: tuple[int, ...] | None
    ranks_per_node: int


class OpenCall(NamedTuple):
    """Call that a head had which is gone, as the client tells the next one."""

    number: int
    received: int
    """Number of its items, or parts, that the client has."""
    taken: int
    """Number of items that its user has read."""
    is_begun: bool
    """Whether the client knows that it was sent to a node."""
    is_in_doubt: bool
    """Whether a node that is gone may have run it."""
    cleared: tuple[int, ...]
    """Nodes that certainly have not run it."""
    left: tuple[Any, ...] | None
    """Fields of the `RetriesLeft`; None: it has spent none."""
    is_preempted: bool = False
    """Whether the provider took back the machine of a node that may have run it."""


class ActorMessage(NamedTuple):
    """An actor to be made. The functions are digests, and the arguments payloads."""

    number: int
    name: str
    constructor: tuple[str, bytes, bytes]
    ending: tuple[str, bytes, bytes]
    lanes: int
    nodes: tuple[int, ...] | None
    booking: tuple[Any, ...]
    """What it books: gpus, cpus, memory_gib, and the need that these make."""
    max_restarts: int
    restarts_left: int
    had_head: bool = False
    """Whether an earlier head has had it."""
    node: int | None = None
    """Node where it has lived last, as far as the client knows."""


def pack_call(message: CallMessage, payload: bytes) -> bytes:
    if message.gang is None:
        return _packed(message) + payload
    return _with_length(dump_plain((*message[:-1], tuple(message.gang)))) + payload


def unpack_call(body: bytes) -> tuple[CallMessage, bytes]:
    """Return a message and the payload behind it."""
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    unpack = _unpacked if end <= _SHORT else _unpacked.__wrapped__
    return unpack(body[_LENGTH.size : end]), body[end:]


@functools.lru_cache(maxsize=_KNOWN)
def _packed(message: CallMessage) -> bytes:
    return _with_length(dump_plain(tuple(message)))


def _with_length(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


@functools.lru_cache(maxsize=_KNOWN)
def _unpacked(data: bytes) -> CallMessage:
    *parts, gang = load_plain(data)
    parts.append(None if gang is None else GangMessage(*gang))
    return CallMessage(*parts)
