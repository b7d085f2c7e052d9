"""Transfers of blobs from one node straight to another, through the pool's network.

OFFER lets a node that has the blob listen for one transfer, and PULL sends the node that needs it there (see
`node.agent.transfers`). If either fails, another node that has the blob is asked; if there is none, `instead` gets it
there through this process. The two nodes are not asked again.

In a head, values of the program travel like that too (`bring`). They cross the program's uplink once, however many
nodes need them, and only pieces of small ones go by the links that Ray or the program carries.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple

from ..core.records import dataclass
from ..events import Emit, ValueRerouted
from ..wire.blobs import Blob
from ..wire.channel import BLOBS, CONTROL
from ..wire.frames import Frame, FrameKind
from .ledger import Ledger
from .link import NodeLink, Readable

_BROUGHT = 1 << 20
"""Least bytes of the program's values that go from node to node. For smaller ones two round trips take longer."""


class Keys(NamedTuple):
    """Certificate and key of a pool's transfers, as PEM: the nodes that send have the key."""

    certificate: str
    key: str


def make_keys() -> Keys | None:
    """Make keys for the transfers of a pool; None if `cryptography` is not installed here."""
    try:
        from .ray.keys import Authority
    except ImportError:
        return None
    return Keys(*Authority().own_pair)


@dataclass(eq=False)
class _Transfer:
    blob: Blob
    source: NodeLink
    target: NodeLink
    secret: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    is_pulled: bool = False
    """Whether the target was asked, and will answer."""
    is_over: bool = False
    """Whether the blob comes in another way. If the target answers all the same, it has it once more."""


class Transfers:
    """Transfers under way. Used under the ledger's lock.

    Args:
        ledger: Shared state of the engine.
        emit: Takes events.
        are_allowed: False: every blob goes through this process.
    """

    def __init__(self, ledger: Ledger, emit: Emit, *, are_allowed: bool) -> None:
        self._are_allowed = are_allowed
        self._ledger = ledger
        self._emit = emit
        self.instead: Callable[[Blob, NodeLink], object] = lambda blob, link: None
        """Function that gets a node a blob in another way."""
        self.arrived: Callable[[Blob, NodeLink], object] = lambda blob, link: None
        """Function that is called when a node has got a blob."""
        self._brings = False
        """Whether the program's values go from node to node too."""
        self.beside: int | None = None
        """Node beside this process, which sends other nodes what nobody else has."""
        self._open: dict[int, _Transfer] = {}
        self._apart: set[tuple[NodeLink, NodeLink]] = set()
        """Nodes that did not reach each other."""

    def serve_program(self, keys: tuple[str, str] | None) -> None:
        """Let the values of a program elsewhere go from node to node too.

        Args:
            keys: Keys that it has made; None: it runs here, or has no `cryptography`.
        """
        self._brings = True
        if keys is not None:
            self._keys = Keys(*keys)

    def bring(self, target: NodeLink, blob: Blob) -> bool:
        """Begin to get a node a blob of this process from another node. Return False if this process should send it."""
        if not self._brings or not self._are_allowed or blob.size < _BROUGHT or target.node == self.beside:
            return False
        beside = None if self.beside is None else self._ledger.links.get(self.beside)
        if beside is not None and self._reaches(beside, target):
            try:
                beside.hold_blob(blob)
            except OSError:  # no room to send it there
                return False
            beside.release_blobs((blob,))  # the OFFER is queued before anything that could drop it
            self._ledger.dirty.add(beside)
        return self.begin(blob, target)

    @functools.cached_property
    def _keys(self) -> Keys | None:
        """Keys that encrypt what goes from node to node; None: nothing is encrypted."""
        return make_keys()

    def begin(self, blob: Blob, target: NodeLink) -> bool:
        """Begin to get a blob to a node, unless that is under way. Return False if no node can send it there."""
        if not self._are_allowed:
            return False
        active = [one for one in self._open.values() if not one.is_over]
        if any(one.target is target and one.blob.digest == blob.digest for one in active):
            return True
        sources = [link for link in self._ledger.links.values() if self._can_send(link, target, blob.digest)]
        if not sources:
            return False
        # The node with the fewest transfers: with a value on its way to many nodes, those that have it share the work.
        busy = [one.source for one in active]
        source = min(sources, key=lambda link: (busy.count(link), link.node))
        number = next(self._ledger.numbers)
        self._open[number] = one = _Transfer(blob, source, target)
        order: dict[str, Any] = {"digest": blob.digest.hex(), "secret": one.secret, "keys": self._keys}
        # Behind the blob, if this process has it: it may still be on its way to the source.
        priority = CONTROL if blob.here() is None else BLOBS
        source.channel.queue(FrameKind.OFFER, number, json.dumps(order).encode(), priority=priority)
        self._ledger.dirty.add(source)
        return True

    def _can_send(self, source: NodeLink, target: NodeLink, digest: bytes) -> bool:
        return source.has_blob(digest) and self._reaches(source, target)

    def _reaches(self, source: NodeLink, target: NodeLink) -> bool:
        if source is target or (source, target) in self._apart:
            return False
        # Nodes on this machine exchange descriptors through this process, which is quicker.
        if source.dialler is None or target.dialler is None or not source.channel.is_attached:
            return False
        if not (source.facts.get("can_transfer") and target.facts.get("can_transfer")):
            return False
        return _are_near(self._address(source), self._address(target))

    def _address(self, link: NodeLink) -> str:
        machine = self._ledger.machines.get(link.node)
        return "" if machine is None else machine.peer.private_ip

    def on_offered(self, link: Readable, frame: Frame) -> None:
        one = self._open.get(frame.ident)
        if one is None or one.source is not link or one.is_over:
            return
        if not frame.lane:
            self._give_up(frame.ident, "the node cannot send it")
            return
        order = {
            "address": self._address(one.source),
            "port": frame.lane,
            "secret": one.secret,
            "digest": one.blob.digest.hex(),
            "size": one.blob.size,
            "certificate": None if self._keys is None else self._keys.certificate,
        }
        one.is_pulled = True
        one.target.send(FrameKind.PULL, frame.ident, json.dumps(order).encode())
        self._ledger.dirty.add(one.target)

    def on_pulled(self, link: Readable, frame: Frame) -> None:
        one = self._open.get(frame.ident)
        if one is None or one.target is not link:
            return
        if frame.lane:
            self._give_up(frame.ident, frame.body.decode(errors="replace"))
            return
        del self._open[frame.ident]
        one.target.has_pulled(one.blob)
        self.arrived(one.blob, one.target)
        self._ledger.dirty.add(one.target)

    def _give_up(self, number: int, reason: str) -> None:
        one = self._open.pop(number)
        if one.is_over:
            return
        self._apart.add((one.source, one.target))
        source, target, size = one.source.node, one.target.node, one.blob.size
        self._ledger.after.append(
            lambda: self._emit(ValueRerouted(node=target, source=source, size_bytes=size, reason=reason))
        )
        self._try_again(one)

    def _try_again(self, one: _Transfer) -> None:
        """Get the blob from another node, or through this process."""
        is_needed = self._ledger.links.get(one.target.node) is one.target and one.target.needs_blob(one.blob.digest)
        if not (is_needed and self.begin(one.blob, one.target)):
            self.instead(one.blob, one.target)

    def node_lost(self, node: int) -> None:
        """Get from elsewhere what was to come from a lost node."""
        self._apart = {pair for pair in self._apart if node not in (pair[0].node, pair[1].node)}
        for number, one in list(self._open.items()):
            if node == one.target.node:
                del self._open[number]
            elif node == one.source.node and not one.is_over:
                one.is_over = True
                if not one.is_pulled:
                    del self._open[number]
                self._try_again(one)


def _are_near(source: str, target: str) -> bool:
    """Return whether two nodes may share a network: loopback addresses are of one machine only."""
    try:
        return ipaddress.ip_address(source).is_loopback == ipaddress.ip_address(target).is_loopback
    except ValueError:  # the address of a node is unknown
        return False
