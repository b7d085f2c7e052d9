"""Reservation of nodes for waiting entries, so that nothing newer overtakes them forever.

A gang that needs certain nodes keeps these from newer entries. An entry that needs resources, or several nodes of any,
keeps as many nodes as it needs, those that lack least; it still goes wherever there is room first. Any other entry that
goes to the first free node of its group closes the group to newer ones. All of that happens when the entry is the first
of its line and was found to be blocked.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from .groups import NO_TURN, Entry, GangEntry, Group, Line, NodeEntry, TaskEntry, Turn
from .node_table import NodeTable
from .waiting_lines import WaitingLines

_FEW_CHANGED = 4
"""Most changed nodes that are looked at one by one. After the end of a large gang, lines search instead."""


class WaitingOrder:
    """Waiting lines and the nodes that are reserved for their first entries."""

    def __init__(self, nodes: NodeTable, waiting: WaitingLines) -> None:
        self._nodes = nodes
        self._waiting = waiting
        self._unreserved: list[tuple[Turn, int, Line]] = []
        """Heap of the blocked gangs whose nodes are not yet filed as wanted."""
        self._pushed = itertools.count()
        self.changed_nodes: dict[NodeEntry, None] = {}
        """Nodes that waiting lines may use since they were last tried. Elsewhere, all lines are blocked but the ready
        ones."""

    def wait(self, entry: Entry, group: Group, *, is_urgent: bool = False, is_first: bool = False) -> Line:
        """Let an entry wait in its line: at its end, or before all other entries."""
        if is_first:
            line = self._waiting.append_left(entry, group)
        else:
            line = self._waiting.append(entry, group, is_urgent=is_urgent)
        if line.count == 1:
            self._nodes.hold(group)
        return line

    def wait_for_event(self, task: TaskEntry, group: Group) -> None:
        """Let a task wait alone in its line, as if it was blocked, although a node would take it in advance."""
        line = self.wait(task, group)
        line.is_ready = False
        self.block(line, task)

    def stop_waiting(self, entry: Entry) -> None:
        """Take an entry out of its line, and lift what was reserved for it."""
        line = self._waiting.remove(entry)
        if line.blocked is entry:
            self._unblock(line)
        if not line.count:
            self._nodes.let_go(line.group)

    def follow(self, line: Line, task: TaskEntry) -> None:
        """Take the first task out of its line, because it was placed on a node that has changed.

        Everywhere else its successor is blocked, too, which saves a search. It inherits the reserved node.
        """
        successor = line.second
        if (
            line.blocked is not task
            or line in line.group.closing
            or not isinstance(successor, TaskEntry)
            or successor.in_advance is not task.in_advance
            or successor.in_bulk is not task.in_bulk
        ):
            self.stop_waiting(task)
            return
        self._waiting.remove_first(line)
        line.blocked = successor
        for node in line.wanted:
            node.chosen_by[line] = successor.turn
            node.set_reserved()
            if node.room > 0 or self._waiting.overfilling:
                self.changed_nodes[node] = None  # for a line whose first entry is older than the successor

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
                line.group.closing[line] = entry.turn
                self._nodes.closings += 1
        if is_gang_of:
            self._waiting.wait_at(line, self._nodes.by_id[tuple(line.group.numbers or ())[line.lacked]])
        else:
            self._waiting.wait_at(line, line.group)

    def _reserve_all(self, line: Line, gang: GangEntry) -> None:
        """Reserve the nodes of a gang, unless an actor must end first: that may never happen."""
        nodes = tuple(line.group.members.values())
        if all(node.can_clear(gang.need) for node in nodes):
            line.wanted = nodes
            for node in nodes:
                node.wanted_by[line] = gang.turn
                node.set_reserved()
            heapq.heappush(self._unreserved, (gang.turn, next(self._pushed), line))

    def _choose(self, line: Line, entry: Entry) -> None:
        line.wanted = self._nodes.pick_to_reserve(line.group, entry.turn, entry.node_count)
        for node in line.wanted:
            node.chosen_by[line] = entry.turn
            node.set_reserved()
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
        """Let entries reserve nodes once more, because an actor has come to this one for life.

        The share of a slot is smaller now, or nothing at all, so that another call may fit.
        """
        self._try_again((*node.chosen_by, *node.wanted_by))
        self.wake(node)

    def actor_left(self, node: NodeEntry) -> None:
        """Have all lines tried, also those for which nothing was reserved while the actor was there."""
        self.changed(node)
        self._waiting.wake_all()

    def _try_again(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._unblock(line)
            self._waiting.make_ready(line)

    def reserve_before(self, turn: Turn) -> None:
        """Reserve the nodes of blocked gangs that are older than an entry with that turn.

        Nothing newer may go to these nodes, or small tasks would keep a gang waiting forever. Nodes wanted by newer
        gangs are filed as usual: thousands of such gangs may wait behind the entry, and it may use their nodes.
        """
        while self._unreserved and self._unreserved[0][0] < turn:
            wanted_from, _, line = heapq.heappop(self._unreserved)
            if line.blocked is None or line.blocked.turn != wanted_from:
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
        self._nodes.chosen -= bool(wanted) and line in wanted[0].chosen_by
        for node in wanted:
            if node.chosen_by.pop(line, None) is None:
                del node.wanted_by[line]
                node.set_kind()
                self._nodes.refile(node)
            node.set_reserved()
            self.wake(node)
        if line.group.closing.pop(line, None) is not None:
            self._nodes.closings -= 1
            if isinstance(entry, GangEntry):  # it may have kept free slots from any line
                self._waiting.wake_all()
            else:  # a task that waits leaves no slot with its share to others, but perhaps room for other needs
                self._waiting.wake(line.group)
                self._waiting.wake_needs()

    def changed(self, node: NodeEntry) -> None:
        """File a node again, and have the lines tried that may use it."""
        self._nodes.refile(node)
        if self._waiting.count:
            self.changed_nodes[node] = None

    def wake(self, node: NodeEntry) -> None:
        """Have the lines tried that may use a node."""
        if self._waiting.count:
            self.changed_nodes[node] = None

    def next_to_fill(self) -> tuple[Line, TaskEntry, NodeEntry] | None:
        """Return the oldest task for a node that has changed, with its line.

        Its line is blocked elsewhere, so no search is needed. Returns None if there is none, or if a ready line comes
        first, which does search.
        """
        if len(self.changed_nodes) > _FEW_CHANGED:
            self._try_all()
            return None
        line: Line | None = None
        place: NodeEntry | None = None
        for node in tuple(self.changed_nodes):
            other = self._waits_for(node)
            if other is None:
                del self.changed_nodes[node]
            elif line is None or place is None or _is_better(other, node, line, place):
                line, place = other, node
        if line is None or place is None:
            return None
        entry = line.first
        if isinstance(entry, GangEntry) and entry.nodes is None:  # also if it is ready: an older line may use the node
            self._try_all()
            return None
        if self._waiting.ready and (ready := self._waiting.oldest_ready()) and ready.first.turn <= entry.turn:
            return None
        if isinstance(entry, TaskEntry):
            return line, entry, place
        self._waiting.make_ready(line)  # it starts, or turns out to lack another node and waits there
        return None

    def _try_all(self) -> None:
        """Have all lines search that may use the nodes that have changed."""
        for node in self.changed_nodes:
            self._waiting.wake(node)
            for group in node.groups:
                # The change is of no use to a line unless the node has room now. To see that costs less than to try it.
                if group.need is None or node.has_room(group.need):
                    self._waiting.wake(group)
        self.changed_nodes.clear()

    def _waits_for(self, node: NodeEntry) -> Line | None:
        """Return the oldest blocked line that may use a node now, or a line of gangs of any nodes that may come first.

        This runs several times for each call, so the order of the checks matters: those that most lines fail are first.
        """
        room = node.room
        is_full = room <= 0
        if not node.takes_more or (is_full and not self._waiting.overfilling):
            return None
        best: Line | None = None
        turn = NO_TURN
        for line in node.lines:
            if line.first.turn < turn and self._may_use(line, node, room):
                best, turn = line, line.first.turn
        for group in node.groups:
            if not group.lines or (is_full and group.need is not None and group.need[0]):
                continue
            for line in group.lines:
                if line.first.turn < turn and self._may_use(line, node, room):
                    if isinstance(line.first, GangEntry):
                        return line
                    best, turn = line, line.first.turn
        return best

    def _may_use(self, line: Line, node: NodeEntry, room: int) -> bool:
        """Return whether a node with free slots has room for the first entry of a line, and is not kept from it."""
        entry = line.first
        need = entry.need
        if need is None:
            assert isinstance(entry, TaskEntry)
            if not self._nodes.has_place(node, entry):
                return False
        elif (need[0] and room < need[0] and room < node.slots) or not (
            node.stock is None or node.stock.has_room(need)
        ):
            return False
        return not self._nodes.is_withheld(node, entry.turn)


def _is_better(line: Line, node: NodeEntry, other: Line, other_node: NodeEntry) -> bool:
    """Return whether a line and a node for it go before another pair: the older line, then the node with more room."""
    if line is other:
        return node.room_for(line.group.need) > other_node.room_for(line.group.need)
    if _is_gang_of_any(line) or _is_gang_of_any(other):
        return not _is_gang_of_any(other)
    return line.first.turn < other.first.turn


def _is_gang_of_any(line: Line) -> bool:
    return isinstance(line.first, GangEntry) and line.first.nodes is None
