"""Deadlock detection for calls that tasks make of each other.

A task that waits for a call of its own keeps its slot. A waiting call can start, sooner or later, only if one of its
places is free, or is held by a task that will end. A task will end if it waits for no call, or only for calls that can
start. The remaining calls wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .groups import NodeEntry
from .resources import UNIT, Booking, Need


class NestedEntry(Protocol):
    """Task or gang."""

    @property
    def id(self) -> int: ...
    @property
    def parent(self) -> int | None: ...


@dataclass(slots=True)
class TakenPlaces:
    """Slots and resources that calls have on one node."""

    slots: int = 0
    cpus: int = 0
    memory_mib: int = 0
    devices: int = 0
    """Thousandths of devices that are booked."""
    users: int = 0
    """Calls that use the devices of their slots."""

    def add(self, other: TakenPlaces, sign: int = 1) -> None:
        self.slots += sign * other.slots
        self.cpus += sign * other.cpus
        self.memory_mib += sign * other.memory_mib
        self.devices += sign * other.devices
        self.users += sign * other.users

    @classmethod
    def of(cls, slots: int, booking: Booking | None) -> TakenPlaces:
        if booking is None:
            return cls(slots)
        devices = len(booking.devices or ()) * booking.amount
        return cls(slots, booking.cpus, booking.memory_mib, devices, int(booking.devices is None))

    def leaves_room(self, node: NodeEntry, need: Need) -> bool:
        """Return whether a need fits on a node beside this. Devices count as a sum, not one by one."""
        if self.slots + min(need.slots, node.slots) > node.slots:
            return False
        stock = node.stock
        if stock is None:
            return True
        has_room = (
            self.cpus + need.cpus <= stock.cpus_of_node and self.memory_mib + need.memory_mib <= stock.mib_of_node
        )
        if need.devices == 0 or not stock.devices:
            return has_room
        if need.devices is None and not need.is_gang and not self.devices:
            return has_room
        return has_room and not self.users and self.devices + stock.amount(need) <= len(stock.devices) * UNIT


@dataclass(frozen=True, kw_only=True)
class Places:
    """Nodes and what calls have of them. `held`: parent -> node -> its part. `needs`: see `Scheduler._needs`."""

    nodes: dict[int, NodeEntry]
    held: dict[int, dict[int, TakenPlaces]]
    needs: Callable[[NestedEntry], tuple[tuple[int, ...], Need, int] | None]


class Family:
    """Open calls by the task that made them."""

    def __init__(self) -> None:
        self._calls: dict[int, NestedEntry] = {}
        self._by_parent: dict[int, set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def parents(self) -> list[int]:
        return list(self._by_parent)

    def add(self, parent: int | None, entry: NestedEntry) -> None:
        assert parent is not None
        self._calls[entry.id] = entry
        self._by_parent.setdefault(parent, set()).add(entry.id)

    def remove(self, call: int) -> None:
        """Forget a call that has ended; unknown calls are ignored."""
        entry = self._calls.pop(call, None)
        if entry is None or entry.parent is None:
            return
        of_parent = self._by_parent[entry.parent]
        of_parent.discard(call)
        if not of_parent:
            del self._by_parent[entry.parent]

    def is_stuck(self, entry: NestedEntry, places: Places) -> bool:
        """Return whether a waiting call can never start.

        Simulates the best case: parents whose calls can all start are assumed to end and free their places. This
        repeats until the call fits, or no further parent can end.
        """
        held = {node: TakenPlaces() for node in places.nodes}
        for of_parent in places.held.values():
            for node, part in of_parent.items():
                held[node].add(part)
        waiting = set(self._by_parent)
        while not self._may_start(entry, held, places):
            going_on = [
                parent
                for parent in waiting
                if all(self._goes_on(self._calls[call], waiting, held, places) for call in self._by_parent[parent])
            ]
            if not going_on:
                return True
            for parent in going_on:
                waiting.discard(parent)
                for node, part in places.held.get(parent, {}).items():
                    held[node].add(part, -1)
        return False

    def _goes_on(self, entry: NestedEntry, waiting: set[int], held: dict[int, TakenPlaces], places: Places) -> bool:
        if places.needs(entry) is None:
            return entry.id not in waiting
        return self._may_start(entry, held, places)

    def _may_start(self, entry: NestedEntry, held: dict[int, TakenPlaces], places: Places) -> bool:
        wanted = places.needs(entry)
        if wanted is None:
            return True
        nodes, need, count = wanted
        return sum(held[n].leaves_room(places.nodes[n], need) for n in nodes) >= count
