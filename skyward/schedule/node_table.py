"""The nodes as the scheduler sees them: what each has to do, how much more it takes, and which takes the next task.

A node is sent as many tasks as it has slots, and while tasks are short some in advance; `NodeTable` learns how long
they take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["SHORT_TASK_NS", "NodeEntry", "NodeTable"]

SHORT_TASK_NS = 1_000_000_000
"""Nanoseconds. Tasks whose running mean is below this are sent in advance: what a slot waits between two is then a
notable part. Batches of joblib's take up to 0.4 s here; on a machine with 15 others to run, those that were not sent in
advance lost a third.
"""
_FIRST_MEAN_NS = 200_000_000
"""What a task is taken for before one has ended."""
_SHORT_ROUND_TRIPS = 32
"""Tasks are short as well if they take less than so many round trips: waiting for one would cost a thirtieth."""
_LEAST_AHEAD = 2
_MOST_AHEAD = 1024
"""Tasks on a node beyond its slots: 5,000 a second over a round trip of 200 ms. They wait in the agent's memory."""
_LEAST_MEAN_NS = 100_000
"""What the shortest task costs its slot, with what is around it."""
_MEAN_WEIGHT = 0.2


@dataclass(slots=True)
class NodeEntry:
    """One node, and what it has to do."""

    id: int
    slots: int
    is_up: bool = True
    is_leaving: bool = False
    """It will be gone soon: nothing new is sent, and what runs may end."""
    is_reachable: bool = True
    """Nothing new is sent while it is not; what was sent stays."""
    round_trip_ns: float = 0.0
    sent: dict[int, None] = field(default_factory=dict)  # tasks, in the order they were sent
    gang_places: int = 0

    @property
    def takes_more(self) -> bool:
        return self.is_up and self.is_reachable and not self.is_leaving

    @property
    def load(self) -> int:
        return len(self.sent) + self.gang_places

    def has_room_for(self, places: int) -> bool:
        # A gang may be larger than the node has slots: it then takes the whole node.
        return self.load + min(places, self.slots) <= self.slots


class NodeTable:
    """Those that are up, or will return. `kept`: nodes that take only what names them."""

    def __init__(self, kept: frozenset[int]) -> None:
        self._kept = kept
        self.by_id: dict[int, NodeEntry] = {}
        self.open: dict[int, NodeEntry] = {}
        """Of those the ones that are not kept."""
        self._mean_ns = float(_FIRST_MEAN_NS)
        self._has_mean = False
        self._turn = 0

    def add(self, node: NodeEntry) -> None:
        self.by_id[node.id] = node
        if node.id not in self._kept:
            self.open[node.id] = node

    def remove(self, node: int) -> None:
        """It will not return."""
        del self.by_id[node]
        self.open.pop(node, None)

    def candidates(self, numbers: tuple[int, ...] | None) -> list[NodeEntry]:
        """Of those that something may go to; None: all that are not kept."""
        if numbers is None:
            return list(self.open.values())
        return [self.by_id[n] for n in numbers if n in self.by_id]

    def are_gone(self, numbers: tuple[int, ...] | None) -> bool:
        """Whether no node is left, for good, that a task may go to."""
        return not self.open if numbers is None else not any(n in self.by_id for n in numbers)

    # How long tasks take --------------------------------------------------------------------------------------------

    def took(self, elapsed_ns: int) -> None:
        """A task has ended."""
        self._mean_ns += _MEAN_WEIGHT * (elapsed_ns - self._mean_ns)
        self._has_mean = True

    def expect(self, expected_ns: float) -> None:
        """A task will take so long: so do those that come with it, if that is less than was known."""
        if expected_ns < self._mean_ns:
            self._mean_ns, self._has_mean = expected_ns, True

    def most_ahead(self, node: NodeEntry) -> int:
        """How many tasks it is sent beyond its slots: none where they are long.

        Slots that began together end together: then each needs one.
        """
        mean_ns, slots = self._mean_ns, node.slots
        is_short = self._has_mean and mean_ns < SHORT_TASK_NS
        if not is_short and mean_ns >= _SHORT_ROUND_TRIPS * node.round_trip_ns:
            return 0
        if not node.round_trip_ns:  # on this machine: asked three times for each call
            return max(_LEAST_AHEAD, slots)
        on_the_way = slots * node.round_trip_ns / max(mean_ns, _LEAST_MEAN_NS)
        return min(max(_LEAST_AHEAD, slots) + math.ceil(on_the_way), max(_MOST_AHEAD, slots))

    # Room -----------------------------------------------------------------------------------------------------------

    def have_room(self, reserved: set[int]) -> bool:
        """Whether any node takes one more task."""
        return any(
            n.takes_more and n.load < n.slots + self.most_ahead(n) and n.id not in reserved for n in self.by_id.values()
        )

    def pick(self, numbers: tuple[int, ...] | None, reserved: set[int], *, ahead: bool) -> NodeEntry | None:
        """The node with most room, in turns among equals. `ahead`: a short task may go where slots are taken."""
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
        """By node, how many of its slots have nothing to do, where another node has more to do than slots."""
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
        """Whether a slot of `idle` would do; if so, it is counted as taken."""
        for number in self.open if numbers is None else numbers:
            if number in idle:
                idle[number] -= 1
                if not idle[number]:
                    del idle[number]
                return True
        return False
