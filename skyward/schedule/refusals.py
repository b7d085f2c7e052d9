"""Calls that can never start: they need more than any node can ever hold, their nodes are gone, or they are deadlocked.

A new call is checked when it comes, and a waiting one when nodes are lost or turn out to hold too little.
"""

from __future__ import annotations

from .actions import Action, FailGang, FailTask, Refuse, Unsettle
from .families import Family
from .groups import Entry, GangEntry, TaskEntry
from .node_table import NodeTable
from .reasons import cannot_hold
from .resources import Need
from .waiting_lines import WaitingLines
from .waiting_order import WaitingOrder

_NO_NODE = "no node is left that it may live on; make it on another node, or open a new pool"


class Refusals:
    """Ends of calls that can never start. The arguments are the scheduler's own."""

    def __init__(
        self,
        nodes: NodeTable,
        tasks: dict[int, TaskEntry],
        waiting: WaitingLines,
        order: WaitingOrder,
        family: Family,
    ) -> None:
        self._nodes = nodes
        self._tasks = tasks
        self._waiting = waiting
        self._order = order
        self._family = family

    def why(self, nodes: tuple[int, ...] | None, need: Need, count: int = 1) -> str:
        """Return why this number of nodes can never hold a need; "" if they can, or if a node is not known yet."""
        able = self._nodes.group(nodes, need).members
        if len(able) >= count:
            return ""
        return cannot_hold(self._nodes.candidates(nodes), need, count, len(able))

    def of_new(self, gang: GangEntry) -> Action | None:
        """Return the end of a gang or actor that does not wait yet; None if it may start some day."""
        numbers = gang.nodes or gang.some_of
        if self._is_homeless(gang):
            return _homeless(gang, next((n for n in numbers or () if n not in self._nodes.by_id), None))
        why = self.why(numbers, gang.need, gang.node_count)
        return _unfit(gang, why) if why else None

    def drop_homeless(self, node: int) -> list[Action]:
        """Fail the waiting calls that need a node that is gone for good, oldest first."""
        homeless = sorted((e for e in self._waiting if self._is_homeless(e)), key=lambda entry: entry.turn)
        for entry in homeless:
            self._drop(entry)
        return [_homeless(entry, node) for entry in homeless]

    def drop_unfit(self) -> list[Action]:
        """Refuse the waiting calls whose nodes have turned out to hold too little."""
        actions: list[Action] = []
        for line in tuple(self._waiting.lines):
            first = line.first
            if first.need is None:
                continue
            numbers = first.nodes or first.some_of if isinstance(first, GangEntry) else first.nodes
            why = self.why(numbers, first.need, first.node_count)
            for entry in line if why else ():
                self._drop(entry)
                actions.append(_unfit(entry, why))
        return actions

    def drop_deadlocked(self, call: Entry | None = None) -> list[Action]:
        """Refuse the waiting nested calls that wait for each other in a circle, or check only one call."""
        if not self._family:
            return []
        actions: list[Action] = []
        for entry in [e for e in self._waiting if e.parent is not None] if call is None else [call]:
            if self._family.is_deadlocked(entry):
                self._drop(entry)
                actions.append(Refuse(entry.id, self._family.nodes_of(entry)))
        return actions

    def _is_homeless(self, entry: Entry) -> bool:
        """Return whether nodes that a call needs are gone for good."""
        if isinstance(entry, TaskEntry):
            return self._nodes.are_gone(entry.nodes)
        if entry.nodes is None:
            return self._nodes.are_gone(entry.some_of)
        return any(n not in self._nodes.by_id for n in entry.nodes)

    def _drop(self, entry: Entry) -> None:
        self._order.stop_waiting(entry)
        self._family.remove(entry.id)
        if isinstance(entry, TaskEntry):
            del self._tasks[entry.id]


def _homeless(entry: Entry, node: int | None) -> Action:
    if isinstance(entry, TaskEntry):
        return FailTask(entry.id, node, False)
    return Unsettle(entry.id, _NO_NODE) if entry.is_actor else FailGang(entry.id, node)


def _unfit(entry: Entry, why: str) -> Action:
    is_actor = isinstance(entry, GangEntry) and entry.is_actor
    return Unsettle(entry.id, why) if is_actor else Refuse(entry.id, (), why)
