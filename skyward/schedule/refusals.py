"""Calls that can never start: no node can ever hold what they need, or the nodes that they name are gone."""

from __future__ import annotations

from collections.abc import Iterator

from .groups import Entry, GangEntry, Group, TaskEntry
from .node_table import NodeTable
from .reasons import cannot_hold
from .resources import Need
from .waiting_lines import WaitingLines


class Refusals:
    """Checks of calls against all that the nodes will ever have."""

    def __init__(self, nodes: NodeTable, waiting: WaitingLines) -> None:
        self._nodes = nodes
        self._waiting = waiting

    def why(self, nodes: tuple[int, ...] | None, need: Need, count: int = 1) -> str:
        """Return why this number of nodes can never hold a need; "" if they can, or if a node is not known yet."""
        able = self._nodes.group(nodes, need).members
        if len(able) >= count:
            return ""
        return cannot_hold(self._nodes.candidates(nodes), need, count, len(able))

    def unfit(self) -> Iterator[tuple[Entry, str]]:
        """Iterate over the waiting calls whose nodes have turned out to hold too little, with the reasons."""
        for line in tuple(self._waiting.lines):
            first = line.first
            need = first.need
            if need is None:
                continue
            count = 1 if isinstance(first, TaskEntry) else first.count if first.nodes is None else len(first.nodes)
            nodes = first.nodes if isinstance(first, TaskEntry) else first.nodes or first.some_of
            if why := self.why(nodes, need, count):
                for entry in line:
                    yield entry, why

    def homeless(self) -> list[Entry]:
        """Return the waiting calls whose nodes are gone for good, oldest first."""
        return sorted((entry for entry in self._waiting if self.is_homeless(entry)), key=lambda entry: entry.turn)

    def is_homeless(self, entry: Entry) -> bool:
        """Return whether nodes that a call needs are gone for good."""
        if isinstance(entry, TaskEntry):
            return self._nodes.are_gone(entry.nodes)
        if entry.nodes is None:
            return self._nodes.are_gone(entry.some_of)
        return any(n not in self._nodes.by_id for n in entry.nodes)

    def group_of(self, entry: Entry) -> Group:
        """Return the nodes that a call may go to, or needs."""
        if isinstance(entry, GangEntry) and entry.nodes is None:
            return self._nodes.group(entry.some_of, entry.need)
        return self._nodes.group(entry.nodes, entry.need if isinstance(entry, TaskEntry) else None)
