"""Reservation of nodes for waiting entries, so that nothing newer overtakes them forever.

A gang that needs certain nodes keeps these from newer entries. An entry that needs resources, or several nodes of any,
keeps as many nodes as it needs, those that lack least; it still goes wherever there is room first. Any other entry that
goes to the first free node of its group closes the group to newer ones. All of that happens when the entry is the first
of its line and was found to be blocked.
"""

from __future__ import annotations

import heapq
from itertools import islice

from .groups import Group, NodeEntry, Turn
from .node_table import NodeTable
from .waiting_lines import Entry, GangEntry, Line, TaskEntry, WaitingLines


class WaitingOrder:
    """Waiting lines and the nodes that are reserved for their first entries."""

    def __init__(self, nodes: NodeTable, waiting: WaitingLines) -> None:
        self._nodes = nodes
        self._waiting = waiting
        self._unreserved: list[tuple[Turn, int]] = []
        """Heap of the blocked gangs whose nodes are not yet filed as wanted."""
        self._changed: dict[NodeEntry, None] = {}
        """Nodes that waiting lines may use since they were last tried."""

    def wait(self, entry: Entry, group: Group, *, is_urgent: bool = False) -> Line:
        """Let an entry wait in its line."""
        self._nodes.hold(group)
        return self._waiting.append(entry, group, is_urgent=is_urgent)

    def stop_waiting(self, entry: Entry) -> None:
        """Take an entry out of its line, and lift what was reserved for it."""
        line = self._waiting.remove(entry)
        if line.blocked is entry:
            self._unblock(line)
        self._nodes.release(line.group)

    def follow(self, line: Line, task: TaskEntry) -> None:
        """Take the first task out of its line, because it was placed on the one node that has changed.

        Everywhere else its successor is blocked, too, which saves a search. It inherits the reserved node.
        """
        _, successor = (*islice(line.entries.values(), 2), None)[:2]
        if (
            line.blocked is not task
            or task.id in line.group.closing
            or not isinstance(successor, TaskEntry)
            or successor.in_advance is not task.in_advance
            or successor.in_bulk is not task.in_bulk
        ):
            self.stop_waiting(task)
            return
        self._waiting.drop_first(line)
        self._nodes.release(line.group)
        for node in line.wanted:
            del node.chosen_by[task.id]
            node.chosen_by[successor.id] = successor.turn
            if node not in self._changed and self._waits_for(node) is not None:
                self._changed[node] = None  # for a line whose first entry is older than the successor

    def block(self, line: Line, entry: Entry) -> None:
        """Reserve nodes for the first entry of a line, and let the line wait until that may have changed."""
        chooses = self._chooses(entry)
        if line.blocked is entry and line.place is line.group and (line.wanted or not chooses):
            return
        is_gang_of = isinstance(entry, GangEntry) and entry.nodes is not None
        if line.blocked is not entry or ((chooses or is_gang_of) and not line.wanted):
            self._unblock(line)
            line.blocked = entry
            if isinstance(entry, GangEntry) and is_gang_of:
                self._reserve_all(line, entry)
            elif chooses:
                self._choose(line, entry)
            elif isinstance(entry, GangEntry) or not entry.in_advance:
                # No node is free for it. Close all of its nodes, or tasks sent in advance would overtake it forever.
                line.group.closing[entry.id] = entry.turn
                self._nodes.closings += 1
        if is_gang_of:
            self._waiting.wait_at(line, tuple(line.group.numbers or ())[line.lacked])
        else:
            self._waiting.wait_at(line, line.group)

    def _reserve_all(self, line: Line, gang: GangEntry) -> None:
        """Reserve the nodes of a gang, unless an actor must end first: that may never happen."""
        nodes = tuple(line.group.members.values())
        if all(node.can_clear(gang.need) for node in nodes):
            line.wanted = nodes
            for node in nodes:
                node.wanted_by[gang.id] = gang.turn
            heapq.heappush(self._unreserved, (gang.turn, gang.id))

    def _choose(self, line: Line, entry: Entry) -> None:
        count = entry.count if isinstance(entry, GangEntry) else 1
        line.wanted = self._nodes.pick_to_reserve(line.group, entry.turn, count)
        for node in line.wanted:
            node.chosen_by[entry.id] = entry.turn
        self._nodes.chosen += bool(line.wanted)

    def _chooses(self, entry: Entry) -> bool:
        """Return whether nodes are chosen to be reserved for an entry."""
        if isinstance(entry, GangEntry):
            return entry.nodes is None and (entry.count > 1 or entry.need.has_numbers)
        # Where devices are booked one by one, calls that need fewer of them would always overtake it.
        return entry.need is not None or self._nodes.booked > 0

    def give_up(self, node: NodeEntry) -> None:
        """Let entries for which this node was chosen choose another one, because it takes no more."""
        self._try_again(tuple(node.chosen_by))

    def give_up_for_actor(self, node: NodeEntry) -> None:
        """Let entries reserve nodes once more, because an actor has come to this one for life."""
        self._try_again((*node.chosen_by, *node.wanted_by))

    def actor_left(self, node: NodeEntry) -> None:
        """Have all lines tried, also those for which nothing was reserved while the actor was there."""
        self.changed(node)
        self._waiting.wake_all()

    def _try_again(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            line = self._waiting.line_of(number)
            if line is not None:
                self._unblock(line)
                self._waiting.make_ready(line)

    def reserve_before(self, turn: Turn) -> None:
        """Reserve the nodes of blocked gangs that are older than an entry with that turn.

        Nothing newer may go to these nodes, or small tasks would keep a gang waiting forever. Nodes wanted by newer
        gangs are filed as usual: thousands of such gangs may wait behind the entry, and it may use their nodes.
        """
        while self._unreserved and self._unreserved[0][0] < turn:
            _, gang = heapq.heappop(self._unreserved)
            line = self._waiting.line_of(gang)
            if line is None or line.blocked is None or line.blocked.id != gang:
                continue
            for node in line.wanted:
                node.set_kind()
                self._nodes.refile(node)

    def _unblock(self, line: Line) -> None:
        """Lift what was reserved for a blocked entry, and have the lines tried that it kept from those nodes."""
        entry, line.blocked = line.blocked, None
        if entry is None:
            return
        wanted, line.wanted = line.wanted, ()
        self._nodes.chosen -= bool(wanted) and entry.id in wanted[0].chosen_by
        for node in wanted:
            if node.chosen_by.pop(entry.id, None) is None:
                del node.wanted_by[entry.id]
                node.set_kind()
                self._nodes.refile(node)
            self.wake(node)
        if line.group.closing.pop(entry.id, None) is not None:
            self._nodes.closings -= 1
            if isinstance(entry, GangEntry):  # it may have kept free slots from any line
                self._waiting.wake_all()
            else:
                self._waiting.wake(line.group)
                self._waiting.wake_watchers()

    def changed(self, node: NodeEntry) -> None:
        """File a node again, and have the lines tried that may use it."""
        self._nodes.refile(node)
        self.wake(node)

    def wake(self, node: NodeEntry) -> None:
        """Have the lines tried that may use a node."""
        if self._waiting:
            self._changed[node] = None

    def next_to_fill(self) -> tuple[Line, TaskEntry, NodeEntry] | None:
        """Return the oldest task for the one node that has changed, with its line.

        All lines are blocked elsewhere, so no search is needed. Returns None if there is none, or if more has changed:
        then the lines that may use those nodes are made ready, and each of them searches.
        """
        if not self._changed:
            return None
        if len(self._changed) == 1 and not self._waiting.has_ready:
            (node,) = self._changed
            line = self._waits_for(node)
            if line is None:
                self._changed.clear()
                return None
            task = line.first
            if isinstance(task, TaskEntry):
                return line, task, node
        for node in self._changed:
            self._waiting.wake(node.id)
            for group in node.groups:
                # The change is of no use to a line unless the node has room now. To see that costs less than to try it.
                if group.need is None or node.has_room(group.need):
                    self._waiting.wake(group)
        self._changed.clear()
        return None

    def _waits_for(self, node: NodeEntry) -> Line | None:
        """Return the oldest blocked line that may use a node now; any line of gangs goes before lines of tasks."""
        if not node.takes_more:
            return None
        best: Line | None = None
        for line in self._waiting.at(node.id):
            entry = line.first
            if node.room_for(entry.need) > 0 and not node.is_withheld(entry.turn):
                return line
        is_full = node.room <= 0
        for group in node.groups:
            # Most groups need no look at their lines. This runs for each call, so the order of these checks matters.
            if group.need is not None and ((is_full and group.need[0]) or not node.has_room(group.need)):
                continue
            for line in self._waiting.at(group):
                entry = line.first
                if isinstance(entry, GangEntry):
                    return line
                if (best is None or entry.turn < best.first.turn) and self._nodes.has_place(node, group, entry):
                    best = line
        return best
