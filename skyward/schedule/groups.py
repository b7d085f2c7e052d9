"""Nodes that the same calls may go to, ordered by their room, so that a choice among thousands takes no search.

A node is filed under its room, beside equals in the order in which they came there. Nodes of different kinds are filed
apart, because the kind decides how many tasks a node is sent in advance, and who may use it. There are few kinds: nodes
of one pool have the same slots, and round trips are rounded.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

Turn = tuple[int, int]
"""Place in the order of all waiting entries; the lowest goes first."""
Kind = tuple[int, float, Turn | None]
"""Slots, round trip in nanoseconds, and the turn of the oldest waiting gang that wants the node."""


@dataclass(slots=True, eq=False)
class NodeEntry:
    """One node and its work. After a change, `NodeTable.refile` puts it into its new places."""

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
    wanted_by: dict[int, Turn] = field(default_factory=dict)
    """Turns of the waiting gangs that need this very node. Nothing newer may go here. The node may be filed as wanted
    later than that: when something newer looks for a node."""
    groups: list[Group] = field(default_factory=list)
    kind: Kind = (0, 0.0, None)

    def __post_init__(self) -> None:
        self.set_kind()

    def set_kind(self) -> None:
        """Renew `kind` after a change of its parts."""
        self.kind = (self.slots, self.round_trip_ns, min(self.wanted_by.values()) if self.wanted_by else None)

    @property
    def takes_more(self) -> bool:
        return self.is_up and self.is_reachable and not self.is_leaving

    @property
    def load(self) -> int:
        return len(self.sent) + self.gang_places

    @property
    def room(self) -> int:
        """Free slots, or below 0 the tasks that were sent in advance."""
        return self.slots - len(self.sent) - self.gang_places

    def has_room_for(self, places: int) -> bool:
        # A gang may have more ranks than the node has slots; it then takes the whole node.
        return self.load + min(places, self.slots) <= self.slots

    def is_withheld(self, turn: Turn) -> bool:
        """Return whether an older waiting entry keeps the node from an entry with that turn."""
        is_wanted = bool(self.wanted_by) and min(self.wanted_by.values()) < turn
        return is_wanted or any(g.is_closed_to(turn) for g in self.groups)


class Rooms:
    """Nodes of one kind by their room. It is never empty while it belongs to a group."""

    __slots__ = ("_top", "by_room", "count", "kind")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.count = 0
        # Not plain dicts: finding the first key of one walks over all removed ones. Empty ones stay for the next node.
        self.by_room: dict[int, OrderedDict[int, NodeEntry]] = {}
        self._top = 0

    def add(self, node: NodeEntry, room: int) -> None:
        if room > self._top or not self.count:
            self._top = room
        self.count += 1
        nodes = self.by_room.get(room)
        if nodes is None:
            nodes = self.by_room[room] = OrderedDict()
        nodes[node.id] = node

    def discard(self, node: NodeEntry, room: int) -> None:
        del self.by_room[room][node.id]
        self.count -= 1

    def move(self, node: NodeEntry, before: int, room: int) -> None:
        """Do the same as `discard` and `add`, in less time."""
        del self.by_room[before][node.id]
        nodes = self.by_room.get(room)
        if nodes is None:
            nodes = self.by_room[room] = OrderedDict()
        nodes[node.id] = node
        self._top = max(self._top, room)

    @property
    def top(self) -> int:
        """The most room of any node."""
        top = self._top
        while not self.by_room.get(top):
            top -= 1
        self._top = top
        return top

    def first(self, room: int) -> NodeEntry:
        """Return the node that has had that room for longest."""
        return next(iter(self.by_room[room].values()))


class Group:
    """Nodes that the same calls may go to. `numbers` is None for all nodes that are not kept for a role."""

    __slots__ = ("_filed", "_rooms", "_wanted", "closing", "free_places", "members", "numbers", "uses")

    def __init__(self, numbers: tuple[int, ...] | None) -> None:
        self.numbers = numbers
        self.members: dict[int, NodeEntry] = {}
        self.closing: dict[int, Turn] = {}
        """Turns of the waiting entries that go to the first free nodes of this group. Nothing newer may overtake them
        here."""
        self.free_places = 0
        """Free slots of all members that take more."""
        self.uses = 0
        self._rooms: dict[Kind, Rooms] = {}
        """Nodes that no waiting gang wants."""
        self._wanted: list[Rooms] = []
        """Nodes that one wants, by its turn."""
        self._filed: dict[int, tuple[Rooms, int]] = {}

    def rooms_for(self, turn: Turn) -> Iterable[Rooms]:
        """Return the nodes that an entry with that turn may use: no older gang wants them."""
        if not self._wanted:
            return self._rooms.values()
        return [*self._rooms.values(), *self._wanted[bisect_left(self._wanted, turn, key=_wanted_from) :]]

    def is_closed_to(self, turn: Turn) -> bool:
        """Return whether an older entry waits for the first free nodes of this group."""
        return bool(self.closing) and min(self.closing.values()) < turn

    def add(self, node: NodeEntry) -> None:
        self.members[node.id] = node
        node.groups.append(self)
        self.file(node)

    def discard(self, node: NodeEntry) -> None:
        self._take_out(node)
        node.groups.remove(self)
        del self.members[node.id]

    def file(self, node: NodeEntry) -> None:
        """Put a node where it belongs now."""
        filed = self._filed.get(node.id)
        takes_more = node.takes_more
        room = node.slots - len(node.sent) - node.gang_places
        if filed is not None and takes_more and filed[0].kind == node.kind:  # the common case: its room has changed
            rooms, before = filed
            rooms.move(node, before, room)
            if before > 0:
                self.free_places -= before
        else:
            self._take_out(node)
            if not takes_more:
                return
            rooms = self._rooms_of(node.kind)
            rooms.add(node, room)
        self._filed[node.id] = (rooms, room)
        if room > 0:
            self.free_places += room

    def _take_out(self, node: NodeEntry) -> None:
        filed = self._filed.pop(node.id, None)
        if filed is None:
            return
        rooms, room = filed
        rooms.discard(node, room)
        if not rooms.count:
            if rooms.kind[2] is None:
                del self._rooms[rooms.kind]
            else:
                self._wanted.remove(rooms)
        if room > 0:
            self.free_places -= room

    def _rooms_of(self, kind: Kind) -> Rooms:
        if kind[2] is None:
            rooms = self._rooms.get(kind)
            if rooms is None:
                rooms = self._rooms[kind] = Rooms(kind)
            return rooms
        for index in range(bisect_left(self._wanted, kind[2], key=_wanted_from), len(self._wanted)):
            if self._wanted[index].kind == kind:
                return self._wanted[index]
            if self._wanted[index].kind[2] != kind[2]:
                break
        rooms = Rooms(kind)
        insort(self._wanted, rooms, key=_wanted_from)
        return rooms


def _wanted_from(rooms: Rooms) -> Turn:
    turn = rooms.kind[2]
    assert turn is not None
    return turn
