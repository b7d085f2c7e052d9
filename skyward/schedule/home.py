"""The node beside the scheduler: short tasks wait for it, if it runs them sooner than others could answer.

A task that goes to another machine costs both ends more than a tiny one takes, and its value is there only after a
round trip. So tasks that are short compared with that go to the home node first. When it has enough of them, the next
ones wait at the scheduler, where they can still go anywhere. They go to other nodes as soon as their wait would be
longer than a round trip. Only tiny ones go on to wait: the home node runs these faster than one scheduler gives them
away.

All of that relies on what earlier tasks took. If the home node ends nothing between two looks, it is stuck, and
everything is as without it until it does. The owner looks every `LOOK_S` seconds while `is_watched`.
"""

from __future__ import annotations

import math
from typing import Final

from .groups import NO_TURN, NodeEntry
from .waiting_lines import WaitingLines

LOOK_S: Final = 0.02
"""Seconds between two looks: long enough for an agent and its slots to run on a busy machine."""
_MOST_NS: Final = 10_000_000
"""Longest usual duration, in nanoseconds, of tasks that go to the home node first. Longer ones profit from a machine of
their own."""
_GIVEN_NS: Final = 35_000
"""Time in nanoseconds that the scheduler's process takes for a task. Source: benchmarks/head.py."""


class Home:
    """Home node.

    Args:
        node: The node.
        waiting: Tasks that wait at the scheduler.
    """

    def __init__(self, node: NodeEntry, waiting: WaitingLines) -> None:
        self.node = node
        self._waiting = waiting
        self.delay_ns = 0.0
        """Shortest time until a task can begin here, in nanoseconds. The node's round trip is that of a busy time."""
        self.left_out_ns = 0.0
        """Longest round trip of a node that was left out although tasks wait; 0: there is none."""
        self._is_stuck = self._was_full = False
        self._ended = self._seen = 0
        """Number of tasks that have ended here, and that number at the last look."""

    @property
    def is_watched(self) -> bool:
        """Return whether tasks wait here that might have gone to other nodes."""
        return self.left_out_ns > 0.0

    def reach_ns(self, usual_ns: float) -> float:
        """Return the longest round trip of nodes that are worth a task; infinity if all are.

        Args:
            usual_ns: Usual duration of a task.
        """
        node = self.node
        slots = node.slots - node.gang_places
        self._is_stuck &= node.room <= 0
        is_kept = not node.takes_more or node.is_booked or node.reserved_from < NO_TURN
        if self._is_stuck or is_kept or slots <= 0 or usual_ns > _MOST_NS:
            return math.inf
        if usual_ns <= _GIVEN_NS * slots:
            return self.delay_ns + usual_ns
        tasks = self._waiting.count + max(0, -node.room)
        return self.delay_ns + usual_ns * max(1.0, tasks / slots)

    def leave_out(self, round_trip_ns: float) -> None:
        """Record that a node with that round trip was left out, although tasks wait."""
        if not self.left_out_ns:
            self._was_full = False
        self.left_out_ns = max(self.left_out_ns, round_trip_ns)

    def task_ended(self) -> None:
        self._ended += 1
        self._is_stuck = False

    def look(self, unsent: int) -> None:
        """Find out whether this node is stuck. `unsent`: its tasks that wait for something else."""
        is_full = self.node.room + unsent <= 0
        if self.node.room >= 0 and not self._waiting.count:
            self.left_out_ns = 0.0
        elif is_full and self._was_full and self._ended == self._seen:
            self._is_stuck, self.left_out_ns = True, 0.0
        self._was_full, self._seen = is_full, self._ended
