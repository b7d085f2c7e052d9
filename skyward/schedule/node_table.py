"""Nodes as the scheduler sees them: their load, their room, and the choice of a node for the next task.

A node gets one task per slot, and while tasks are short some in advance. `NodeTable` learns how long tasks take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class NodeEntry:
    """One node and its work."""

    id: int
    slots: int
    is_up: bool = True
    is_leaving: bool = False
    """Whether the node will soon be gone. It gets no new tasks; running ones may end."""
    is_reachable: bool = True
    """Whether the link is up. While it is down, the node gets no new tasks and keeps the old ones."""
    round_trip_ns: float = 0.0
    sent: dict[int, None] = field(default_factory=dict)  # a dict as an ordered set: tasks in the order of sending
    gang_places: int = 0

    @property
    def takes_more(self) -> bool:
        return self.is_up and self.is_reachable and not self.is_leaving

    @property
    def load(self) -> int:
        return len(self.sent) + self.gang_places

    def has_room_for(self, places: int) -> bool:
        # A gang may have more ranks than the node has slots; it then takes the whole node.
        return self.load + min(places, self.slots) <= self.slots


class NodeTable:
    """Nodes that are up or will return. `kept` nodes take only tasks that name them."""

    def __init__(self, kept: frozenset[int]) -> None:
        self._kept = kept
        self.by_id: dict[int, NodeEntry] = {}
        self.open: dict[int, NodeEntry] = {}
        """Nodes that are not kept."""
        self._mean_ns = float(_FIRST_MEAN_NS)
        self._has_mean = False
        self._turn = 0

    def add(self, node: NodeEntry) -> None:
        self.by_id[node.id] = node
        if node.id not in self._kept:
            self.open[node.id] = node

    def remove(self, node: int) -> None:
        """Forget a node that will not return."""
        del self.by_id[node]
        self.open.pop(node, None)

    def candidates(self, numbers: tuple[int, ...] | None) -> list[NodeEntry]:
        """Return the nodes that a task may go to; None stands for all nodes that are not kept."""
        if numbers is None:
            return list(self.open.values())
        return [self.by_id[n] for n in numbers if n in self.by_id]

    def are_gone(self, numbers: tuple[int, ...] | None) -> bool:
        """Return whether all nodes that a task may go to are gone for good."""
        return not self.open if numbers is None else not any(n in self.by_id for n in numbers)

    # How long tasks take --------------------------------------------------------------------------------------------

    def took(self, elapsed_ns: int) -> None:
        """Record how long a task took."""
        self._mean_ns += _MEAN_WEIGHT * (elapsed_ns - self._mean_ns)
        self._has_mean = True

    def expect(self, expected_ns: float) -> None:
        """Record an estimate for the next tasks, if it is below the running mean."""
        if expected_ns < self._mean_ns:
            self._mean_ns, self._has_mean = expected_ns, True

    def most_ahead(self, node: NodeEntry) -> int:
        """Return how many tasks a node gets beyond its slots; 0 if tasks are long.

        Slots that start together end together, so each slot needs a task in advance.
        """
        mean_ns, slots = self._mean_ns, node.slots
        is_short = self._has_mean and mean_ns < SHORT_TASK_NS
        if not is_short and mean_ns >= _SHORT_ROUND_TRIPS * node.round_trip_ns:
            return 0
        if not node.round_trip_ns:  # on this machine; a fast path, because this runs three times per call
            return max(_LEAST_AHEAD, slots)
        on_the_way = slots * node.round_trip_ns / max(mean_ns, _LEAST_MEAN_NS)
        return min(max(_LEAST_AHEAD, slots) + math.ceil(on_the_way), max(_MOST_AHEAD, slots))

    # Room -----------------------------------------------------------------------------------------------------------

    def have_room(self, reserved: set[int]) -> bool:
        """Return whether any node takes one more task."""
        return any(
            n.takes_more and n.load < n.slots + self.most_ahead(n) and n.id not in reserved for n in self.by_id.values()
        )

    def pick(self, numbers: tuple[int, ...] | None, reserved: set[int], *, ahead: bool) -> NodeEntry | None:
        """Return the node with the most room, in turns among equals. `ahead`: a free slot is not required."""
        candidates = self.candidates(numbers)
        best: NodeEntry | None = None
        best_room = 0
        count = len(candidates)
        for offset in range(count):
            node = candidates[(self._turn + offset) % count]
            room = node.slots - node.load
            has_room = room > 0 or (ahead and room > -self.most_ahead(node))
            if has_room and node.takes_more and node.id not in reserved and (best is None or room > best_room):
                best, best_room = node, room
        self._turn += 1
        return best

    def idle_slots(self) -> dict[int, int]:
        """Return node -> idle slots, while another node has more tasks than slots; otherwise {}."""
        has_idle = is_uneven = False
        for node in self.by_id.values():
            if node.takes_more:
                room = node.slots - node.load
                has_idle |= room > 0
                is_uneven |= room < 0
        if not has_idle or not is_uneven:
            return {}
        return {n.id: n.slots - n.load for n in self.by_id.values() if n.takes_more and n.slots > n.load}

    def take_idle(self, idle: dict[int, int], numbers: tuple[int, ...] | None) -> bool:
        """Take one slot of `idle` on an allowed node. Returns False if there is none."""
        for number in self.open if numbers is None else numbers:
            if number in idle:
                idle[number] -= 1
                if not idle[number]:
                    del idle[number]
                return True
        return False
