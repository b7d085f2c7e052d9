"""Deadlock detection for calls that tasks make of each other.

A task that waits for a call of its own keeps its slot. A waiting call can start, sooner or later, only if one of its
places is free, or is held by a task that will end. A task will end if it waits for no call, or only for calls that can
start. The remaining calls wait for each other in a circle.
"""

from __future__ import annotations

from ..core.records import dataclass
from .groups import Entry, GangEntry, NodeEntry, TaskEntry
from .node_table import NodeTable
from .resources import PLAIN, UNIT, Booking, Need
from .running_gangs import Gangs


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


class Family:
    """Open calls by the task that made them. The arguments are the scheduler's own: they change, and are only read."""

    def __init__(self, nodes: NodeTable, tasks: dict[int, TaskEntry], gangs: Gangs) -> None:
        self._nodes = nodes
        self._tasks = tasks
        self._gangs = gangs
        self._calls: dict[int, Entry] = {}
        self._by_parent: dict[int, set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, parent: int | None, entry: Entry) -> None:
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

    def nodes_of(self, entry: Entry) -> tuple[int, ...]:
        """Return the nodes that a call may go to."""
        numbers = entry.nodes or entry.some_of if isinstance(entry, GangEntry) else entry.nodes
        return tuple(node.id for node in self._nodes.candidates(numbers))

    def is_deadlocked(self, entry: Entry) -> bool:
        """Return whether a call waits that can never start.

        Simulates the best case: parents whose calls can all start are assumed to end and free their places. This
        repeats until the call fits, or no further parent can end.
        """
        if self._has_begun(entry):
            return False
        places = self._places_by_parent()
        held = {node: TakenPlaces() for node in self._nodes.by_id}
        for of_parent in places.values():
            for node, part in of_parent.items():
                held[node].add(part)
        waiting = set(self._by_parent)
        while not self._may_start(entry, held):
            going_on = [
                parent
                for parent in waiting
                if all(self._goes_on(self._calls[call], waiting, held) for call in self._by_parent[parent])
            ]
            if not going_on:
                return True
            for parent in going_on:
                waiting.discard(parent)
                for node, part in places.get(parent, {}).items():
                    held[node].add(part, -1)
        return False

    def _goes_on(self, entry: Entry, waiting: set[int], held: dict[int, TakenPlaces]) -> bool:
        if self._has_begun(entry):
            return entry.id not in waiting
        return self._may_start(entry, held)

    def _may_start(self, entry: Entry, held: dict[int, TakenPlaces]) -> bool:
        need = entry.need or PLAIN
        room = sum(held[n].leaves_room(self._nodes.by_id[n], need) for n in self.nodes_of(entry))
        return room >= entry.node_count

    def _has_begun(self, entry: Entry) -> bool:
        return entry.id in self._gangs or (isinstance(entry, TaskEntry) and entry.node is not None)

    def _places_by_parent(self) -> dict[int, dict[int, TakenPlaces]]:
        """Return the places of tasks and gangs with calls of their own, by node."""
        held: dict[int, dict[int, TakenPlaces]] = {}
        for parent in self._by_parent:
            task = self._tasks.get(parent)
            if task is not None and task.node is not None:
                held[parent] = {task.node.id: TakenPlaces.of(1, task.node.sent.get(task.id))}
            elif parent in self._gangs:
                of_gang = self._gangs[parent]
                held[parent] = {n: TakenPlaces.of(*part) for n, part in of_gang.items() if n in self._nodes.by_id}
        return held
