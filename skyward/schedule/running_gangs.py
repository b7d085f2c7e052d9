"""Gangs and actors that run, with the slots and resources that they hold on each of their nodes.

A gang starts on all of its nodes at once, or not at all. An actor with resources is a gang of one node without slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .actions import Action, Settle, StartGang
from .groups import GangEntry, Line, NodeEntry
from .node_table import NodeTable
from .resources import Booking, Need
from .waiting_order import WaitingOrder

Gangs = dict[int, dict[int, tuple[int, Booking | None]]]
"""Slots and resources of running gangs, by node."""


class RunningGangs:
    """Start and end of gangs and actors. The arguments are the scheduler's own."""

    def __init__(self, nodes: NodeTable, order: WaitingOrder) -> None:
        self._nodes = nodes
        self._order = order
        self.held: Gangs = {}

    def start(self, gang: GangEntry, line: Line) -> Action | None:
        """Let the first gang of a line take its nodes; None if they have no room for it now."""
        if gang.nodes is None:
            members = self._nodes.pick_some(line.group, gang.turn, gang.count)
        else:
            members = self._nodes.candidates(gang.nodes)
            if self._lacks_one(gang, line, members):
                return None
        if not members:
            return None
        bookings = self._hold(gang.id, gang.need, dict.fromkeys(members))
        devices = tuple(None if booking is None else booking.devices for booking in bookings)
        if gang.is_actor:
            self._order.give_up_for_actor(members[0])
            return Settle(gang.id, members[0].id, devices[0])
        has_devices = any(own is not None for own in devices)
        return StartGang(gang.id, tuple(node.id for node in members), devices if has_devices else ())

    def _lacks_one(self, gang: GangEntry, line: Line, members: list[NodeEntry]) -> bool:
        """Return whether a gang lacks one of its nodes. The search begins where it ended last time."""
        for offset in range(len(members)):
            index = (line.lacked + offset) % len(members)
            node = members[index]
            if not node.takes_more or node.room_for(gang.need) < 1 or self._nodes.is_withheld(node, gang.turn):
                line.lacked = index
                return True
        return False

    def take_up(self, gang: int, need: Need, devices: Mapping[int, tuple[int, ...] | None]) -> None:
        """Record a gang or actor that runs already. `devices`: those that it has booked, by its nodes."""
        self._hold(gang, need, {self._nodes.by_id[number]: own for number, own in devices.items()})

    def _hold(self, gang: int, need: Need, devices: Mapping[NodeEntry, tuple[int, ...] | None]) -> list[Booking | None]:
        """Take slots and resources of nodes: these devices of each, or any."""
        held = self.held[gang] = {}
        for node, own in devices.items():
            places = min(need.slots, node.slots)
            held[node.id] = places, self._nodes.book(node, need, own)
            node.gang_places += places
            self._nodes.refile(node)
        return [booking for _, booking in held.values()]

    def end(self, gang: int) -> Iterator[tuple[NodeEntry, Booking | None]]:
        """Free the slots of a gang, and iterate over its nodes with the bookings to release."""
        for number, (places, booking) in self.held.pop(gang, {}).items():
            node = self._nodes.by_id.get(number)
            if node is not None and node.is_up:
                node.gang_places = max(0, node.gang_places - places)
                yield node, booking

    def node_lost(self, node: int) -> None:
        """Forget what gangs hold on a node: one that ends later must not free places on its replacement."""
        for held in self.held.values():
            held.pop(node, None)
