"""Nodes as the scheduler sees them, and the choice of a node for the next task.

A node gets one task per slot, and while tasks are short some in advance. `NodeTable` learns how long tasks take.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from .groups import Group, Kind, NodeEntry, Rooms, Turn

SHORT_TASK_NS = 1_000_000_000
"""Longest running mean, in nanoseconds, at which tasks are sent in advance; the pause between two would be notable.

joblib's batches take up to 0.4 s. On a machine busy with 15 other processes, batches that were not sent in advance lost
a third.
"""
_FIRST_MEAN_NS = 200_000_000
"""Assumed duration of a task before one has ended."""
_SHORT_ROUND_TRIPS = 32
"""Tasks shorter than this number of round trips count as short too: waiting for one would cost a thirtieth."""
_LEAST_AHEAD = 2
_MOST_AHEAD = 1024
"""Most tasks on a node beyond its slots: 5,000 per second at a round trip of 200 ms. They wait in the agent."""
_LEAST_MEAN_NS = 100_000
"""Cost of the shortest task for its slot, overhead included."""
_MEAN_WEIGHT = 0.2
_ROUND_TRIP_STEPS = 16
"""Steps between a round trip and its double. Rounded ones make few kinds of nodes; the error is 6 % at most."""
_UNUSED_GROUPS = 16
"""Groups that are kept although nothing waits for them, so that repeated calls do not build them again."""


def rounded(round_trip_ns: float) -> float:
    """Round a round trip up to one of a few values."""
    if round_trip_ns <= 0:
        return 0.0
    step = 2.0 ** math.floor(math.log2(round_trip_ns)) / _ROUND_TRIP_STEPS
    return math.ceil(round_trip_ns / step) * step


class NodeTable:
    """Nodes that are up or will return. `kept` nodes take only tasks that name them."""

    def __init__(self, kept: frozenset[int]) -> None:
        self._kept = kept
        self.by_id: dict[int, NodeEntry] = {}
        self.open = Group(None)
        """Nodes that are not kept."""
        self._groups: dict[tuple[int, ...] | None, Group] = {None: self.open}
        """All groups by their numbers."""
        self._unused: OrderedDict[Group, None] = OrderedDict()
        self.closings = 0
        """Entries in `Group.closing` of all groups."""
        self._mean_ns = float(_FIRST_MEAN_NS)
        self._has_mean = False
        self._has_far_nodes = False

    def add(self, number: int, slots: int) -> NodeEntry:
        """Add a node, or make the replacement of a lost one take its number."""
        node = self.by_id.get(number)
        if node is None:
            node = self.by_id[number] = NodeEntry(number, slots)
            for group in self._groups.values():
                if number not in self._kept if group.numbers is None else number in group.numbers:
                    group.add(node)
        node.slots = slots
        node.is_up = node.is_reachable = True
        node.is_leaving = False
        node.round_trip_ns = 0.0
        node.sent.clear()
        node.gang_places = 0
        node.set_kind()
        self.refile(node)
        return node

    def remove(self, number: int) -> None:
        """Forget a node that will not return."""
        node = self.by_id.pop(number)
        for group in tuple(node.groups):
            group.discard(node)

    def refile(self, node: NodeEntry) -> None:
        """Put a node into its new places, after a change of its room or state."""
        for group in node.groups:
            group.file(node)

    def set_round_trip(self, node: NodeEntry, round_trip_ns: float) -> None:
        node.round_trip_ns = rounded(round_trip_ns)
        self._has_far_nodes |= round_trip_ns > 0
        node.set_kind()
        self.refile(node)

    def candidates(self, numbers: tuple[int, ...] | None) -> list[NodeEntry]:
        """Return the nodes that a task may go to; None stands for all nodes that are not kept."""
        if numbers is None:
            return list(self.open.members.values())
        return [self.by_id[n] for n in numbers if n in self.by_id]

    def are_gone(self, numbers: tuple[int, ...] | None) -> bool:
        """Return whether all nodes that a task may go to are gone for good."""
        return not self.open.members if numbers is None else not any(n in self.by_id for n in numbers)

    # Groups ---------------------------------------------------------------------------------------------------------

    def group(self, numbers: tuple[int, ...] | None) -> Group:
        """Return the group of these nodes. It lasts while something holds it, and for some time after."""
        if numbers is None:
            return self.open
        group = self._groups.get(numbers)
        if group is None:
            group = self._groups[numbers] = Group(numbers)
            for node in dict.fromkeys(self.candidates(numbers)):
                group.add(node)
            self._keep_unused(group)
        elif group in self._unused:
            self._unused.move_to_end(group)
        return group

    def hold(self, group: Group) -> None:
        """Keep a group until `release`."""
        group.uses += 1
        self._unused.pop(group, None)

    def release(self, group: Group) -> None:
        group.uses -= 1
        if not group.uses and group is not self.open:
            self._keep_unused(group)

    def _keep_unused(self, group: Group) -> None:
        self._unused[group] = None
        if len(self._unused) > _UNUSED_GROUPS:
            oldest, _ = self._unused.popitem(last=False)
            del self._groups[oldest.numbers]
            for node in tuple(oldest.members.values()):
                oldest.discard(node)

    # How long tasks take --------------------------------------------------------------------------------------------

    @property
    def mean_s(self) -> float | None:
        """Mean duration of a task, in seconds; None before one has ended."""
        return self._mean_ns / 1e9 if self._has_mean else None

    def took(self, elapsed_ns: int) -> bool:
        """Record how long a task took. Return whether nodes may now take more in advance than before."""
        before, had_mean = self._mean_ns, self._has_mean
        self._mean_ns = now = before + _MEAN_WEIGHT * (elapsed_ns - before)
        self._has_mean = True
        if now < SHORT_TASK_NS and not (had_mean and before < SHORT_TASK_NS):
            return True
        return self._has_far_nodes and now < before

    def expect(self, expected_ns: float) -> bool:
        """Record an estimate for the next tasks, if it is below the running mean. Return whether it is."""
        if expected_ns < self._mean_ns:
            self._mean_ns, self._has_mean = expected_ns, True
            return True
        return False

    @property
    def _is_short(self) -> bool:
        return self._has_mean and self._mean_ns < SHORT_TASK_NS

    def most_ahead(self, kind: Kind) -> int:
        """Return how many tasks a node of that kind gets beyond its slots; 0 if tasks are long.

        Slots that start together end together, so each slot needs a task in advance.
        """
        slots, round_trip_ns, _ = kind
        if not self._is_short and self._mean_ns >= _SHORT_ROUND_TRIPS * round_trip_ns:
            return 0
        if not round_trip_ns:  # on this machine; a fast path, because this runs for each call
            return max(_LEAST_AHEAD, slots)
        on_the_way = slots * round_trip_ns / max(self._mean_ns, _LEAST_MEAN_NS)
        return min(max(_LEAST_AHEAD, slots) + math.ceil(on_the_way), max(_MOST_AHEAD, slots))

    # Room -----------------------------------------------------------------------------------------------------------

    def pick(self, group: Group, turn: Turn, *, ahead: bool) -> NodeEntry | None:
        """Return the node with the most room for a task, in turns among equals.

        Args:
            group: Nodes that the task may go to.
            turn: Turn of the task. Older waiting entries may keep nodes from it.
            ahead: Whether a free slot is not required.
        """
        if self.closings and group.is_closed_to(turn):
            return None
        best: NodeEntry | None = None
        best_room = 0
        for rooms in group.rooms_for(turn):
            room = rooms.top
            if best is not None and room <= best_room:
                continue
            if room > 0 or (ahead and room > -self.most_ahead(rooms.kind)):
                if not self.closings:
                    best, best_room = rooms.first(room), room
                elif (node := self._first(rooms, turn)) is not None and (best is None or node.room > best_room):
                    best, best_room = node, node.room
        return best

    def preferred(self, numbers: tuple[int, ...], group: Group, turn: Turn) -> NodeEntry | None:
        """Return the one of a few nodes with the most free slots for a task; None if none has one."""
        if self.closings and group.is_closed_to(turn):
            return None
        nodes = [group.members[number] for number in numbers if number in group.members]
        free = [node for node in nodes if node.room > 0 and node.takes_more and not node.is_withheld(turn)]
        return max(free, key=lambda node: node.room, default=None)

    def _first(self, rooms: Rooms, turn: Turn) -> NodeEntry | None:
        """Return the node with the most room that no entry of another group keeps from this one.

        Only free slots are searched. A place in advance is worth no search: the task is tried again when a slot of its
        nodes falls free.
        """
        if rooms.top <= 0:
            node = rooms.first(rooms.top)
            return None if node.is_withheld(turn) else node
        free = (room for room in sorted(rooms.by_room, reverse=True) if room > 0)
        return next((n for room in free for n in rooms.by_room[room].values() if not n.is_withheld(turn)), None)

    def pick_for_gang(self, group: Group, turn: Turn, places: int) -> NodeEntry | None:
        """Return the node with the most room for a gang that needs one node of the group."""
        if self.closings and group.is_closed_to(turn):
            return None
        best: NodeEntry | None = None
        for rooms in group.rooms_for(turn):
            for node in self._with_room(rooms, min(places, rooms.kind[0])):
                if node.is_withheld(turn):
                    continue
                if best is None or node.room > best.room:
                    best = node
                break
        return best

    def _with_room(self, rooms: Rooms, places: int) -> Iterator[NodeEntry]:
        for room in sorted(rooms.by_room, reverse=True):
            if room < places:
                return
            yield from rooms.by_room[room].values()
