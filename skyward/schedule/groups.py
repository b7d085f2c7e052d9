"""Nodes that the same calls may go to, ordered by their room, so that a choice among thousands takes no search.

A node is filed under its room, beside equals in the order in which they came there. Nodes of different kinds are filed
apart, because the kind decides how many tasks a node is sent in advance, and who may use it. There are few kinds: nodes
of one pool have the same slots, and round trips are rounded.

Calls that need different resources see different room on the same node, so each need has groups of its own. A node that
changes is only noted, once for all groups. A group files the changed nodes when the next choice is made in it: one that
nobody asks costs nothing.

Calls that wait, and their lines, are here as well: nodes and groups know the lines that wait for them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import field

from ..core.records import dataclass
from .resources import PLAIN, Booking, Need, Stock

Turn = int
"""Place in the order of all waiting entries; the lowest goes first."""
NO_TURN: Turn = 2**61
"""Later than the turn of any entry."""
Kind = tuple[int, float, Turn | None, bool]
"""Slots, round trip in nanoseconds, the turn of the oldest waiting entry that wants the node, and whether its devices
are booked one by one."""

_LEAST_ROOM = -64
_MANY_CHANGES = 8
"""Changes for each of its nodes, above which a group files all of them."""


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
    stock: Stock | None = None
    """Resources that are left. None: nothing is known of them."""
    sent: dict[int, Booking | None] = field(default_factory=dict)  # in the order of sending
    gang_places: int = 0
    wanted_by: dict[Line, Turn] = field(default_factory=dict)
    """Turns of the waiting gangs that need this very node. Nothing newer may go here. The node may be filed as wanted
    later than that: when something newer looks for a node."""
    chosen_by: dict[Line, Turn] = field(default_factory=dict)
    """Turns of the waiting entries that have chosen the node, although others would do. Nothing newer may go here.
    There are few such nodes, and they change all the time, so they are filed as any other."""
    reserved_from: Turn = NO_TURN
    """The oldest turn of both."""
    groups: tuple[Group, ...] = ()
    lines: dict[Line, None] = field(default_factory=dict)
    """Lines of gangs that lack this node."""
    is_booked: bool = False
    """Whether its devices are booked one by one."""
    kind: Kind = (0, 0.0, None, False)

    def __post_init__(self) -> None:
        self.set_kind()

    def set_kind(self) -> None:
        """Renew `kind` after a change of its parts."""
        turn = min(self.wanted_by.values()) if self.wanted_by else None
        self.is_booked = self.stock is not None and self.stock.is_booked
        self.kind = (self.slots, self.round_trip_ns, turn, self.is_booked)

    def set_reserved(self) -> None:
        """Renew `reserved_from` after a change of `wanted_by` or `chosen_by`."""
        if not self.wanted_by and len(self.chosen_by) == 1:  # the common case
            (self.reserved_from,) = self.chosen_by.values()
            return
        self.reserved_from = min((*self.wanted_by.values(), *self.chosen_by.values()), default=NO_TURN)

    @property
    def takes_more(self) -> bool:
        return self.is_up and self.is_reachable and not self.is_leaving

    @property
    def load(self) -> int:
        return len(self.sent) + self.gang_places

    @property
    def places_in_use(self) -> int:
        """Slots in use, or as many as the booked resources leave nothing for."""
        used = min(self.load, self.slots)
        return used if self.stock is None else max(used, self.stock.booked_slots)

    @property
    def room(self) -> int:
        """Free slots, or below 0 the tasks that were sent in advance."""
        return self.slots - len(self.sent) - self.gang_places

    def room_for(self, need: Need | None) -> int:
        """Return how often a need fits now. Below 1: it does not, and the more is lacking, the lower it is."""
        room = self.slots - len(self.sent) - self.gang_places
        stock = self.stock
        if need is None:
            return min(room, stock.fits(PLAIN)) if stock is not None and stock.bookings else room
        # A gang may have more ranks than the node has slots; it then takes the whole node.
        slots = min(need.slots, self.slots)
        fits = stock.fits(need) if stock is not None else room
        if not slots:
            return fits if stock is not None else 1
        if room >= slots and fits > 0:
            return min(room // slots, fits)
        return max(_LEAST_ROOM, min(0, room - slots, fits))

    def has_room(self, need: Need) -> bool:
        """Return whether a need fits now, in less time than `room_for`."""
        room = self.slots - len(self.sent) - self.gang_places
        if need[0] and room < need[0] and room < self.slots:
            return False
        return self.stock is None or self.stock.has_room(need)

    def can_hold(self, need: Need) -> bool:
        """Return whether the node may ever have room for a need."""
        if self.stock is not None:
            return self.stock.can_hold(need)
        return not (self.is_up and (need.devices or need.accelerator))

    def can_clear(self, need: Need) -> bool:
        """Return whether the node has room for a need once its calls have ended. Its actors stay."""
        return self.stock is None or self.stock.can_clear(need)

    def is_chosen_before(self, turn: Turn) -> bool:
        return bool(self.chosen_by) and min(self.chosen_by.values()) < turn


@dataclass(slots=True, eq=False)
class TaskEntry:
    """Open task."""

    id: int
    nodes: tuple[int, ...] | None  # allowed nodes; None for any that is not kept
    in_advance: bool = True  # may be sent before a slot is free
    in_bulk: bool = True  # may be one of many that a node gets in advance
    least_ns: float = 0.0  # expected duration, if that may be longer than the mean
    node: NodeEntry | None = field(default=None, repr=False)
    is_recalled: bool = False
    parent: int | None = None
    """Task or gang that called it."""
    turn: Turn = 0
    prefer: tuple[int, ...] = ()
    """Nodes to choose first."""
    need: Need | None = None
    """Resources beyond a slot and its share."""
    line: Line | None = field(default=None, repr=False)
    """Line in which it waits."""

    @property
    def node_count(self) -> int:
        """Number of nodes that it takes."""
        return 1


@dataclass(slots=True, eq=False)
class GangEntry:
    """Waiting gang."""

    id: int
    nodes: tuple[int, ...] | None  # needs all of them; None for any `count` of `some_of`
    some_of: tuple[int, ...] | None  # None for any node that is not kept
    need: Need  # per node
    count: int = 1
    parent: int | None = None
    turn: Turn = 0
    line: Line | None = field(default=None, repr=False)
    """Line in which it waits."""

    @property
    def node_count(self) -> int:
        """Number of nodes that it takes."""
        return self.count if self.nodes is None else len(self.nodes)

    @property
    def is_actor(self) -> bool:
        """Return whether it is an actor with resources, which takes no slot."""
        return not self.need.slots


Entry = TaskEntry | GangEntry


@dataclass(slots=True, eq=False)
class Line:
    """Entries of one need that may go to the same nodes, so whatever blocks the first blocks all. Never empty."""

    key: Hashable
    group: Group
    first: Entry
    """The oldest entry. It is looked at far more often than it changes, so it is kept beside `entries`."""
    count: int = 0
    """Entries that wait."""
    entries: deque[Entry] = field(default_factory=deque)
    """Entries in their order, and between them some that wait no longer. The first one waits."""
    is_ready: bool = False
    place: Group | NodeEntry | None = None
    """Where it waits."""
    blocked: Entry | None = None
    """The first entry, once it was found to be blocked. Nodes may be reserved for it."""
    wanted: tuple[NodeEntry, ...] = ()
    """Nodes that are reserved for the blocked entry."""
    lacked: int = 0
    """Index of the node that a blocked gang was found to lack."""

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over a copy of the entries, oldest first."""
        return iter([entry for entry in self.entries if entry.line is self])

    @property
    def second(self) -> Entry | None:
        """Return the entry after the first."""
        entries = self.entries
        while len(entries) > 1:
            if entries[1].line is self:
                return entries[1]
            del entries[1]
        return None

    @property
    def may_overfill(self) -> bool:
        """Return whether its entries may go to nodes without a free slot: actors, and tasks in advance."""
        need = self.first.need
        return need is None or not need.slots


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

    def at(self, room: int) -> Iterable[NodeEntry]:
        return self.by_room[room].values()


class Changes:
    """Nodes that have changed, in the order of their changes. Each group knows how far it has read."""

    __slots__ = ("forgotten", "most", "nodes")

    def __init__(self) -> None:
        self.nodes: list[NodeEntry] = []
        self.most = 0
        """Number of them above which they are forgotten."""
        self.forgotten = 0
        """Number of changes before those."""

    @property
    def count(self) -> int:
        return self.forgotten + len(self.nodes)

    def add(self, node: NodeEntry) -> None:
        self.nodes.append(node)
        if len(self.nodes) > self.most:
            self.forget()

    def forget(self) -> None:
        """Drop all changes. Groups that have not read them file all of their nodes."""
        self.forgotten += len(self.nodes)
        self.nodes.clear()


class Group:
    """Nodes that the same calls may go to.

    Args:
        numbers: The nodes; None for all that are not kept for a role.
        changes: Changes of all nodes.
        need: Resources of each call; None for a slot and its share. Nodes that can never hold them are left out.
    """

    __slots__ = (
        "_changes",
        "_filed",
        "_free",
        "_read",
        "_room",
        "_rooms",
        "_wanted",
        "closing",
        "lines",
        "members",
        "need",
        "numbers",
        "uses",
    )

    def __init__(self, numbers: tuple[int, ...] | None, changes: Changes, need: Need | None = None) -> None:
        self.numbers = numbers
        self.need = need
        self.members: dict[int, NodeEntry] = {}
        self.lines: dict[Line, None] = {}
        """Lines that wait for any of the nodes."""
        self.closing: dict[Line, Turn] = {}
        """Turns of the waiting entries that go to the first free nodes of this group. Nothing newer may overtake them
        here."""
        self._free = 0
        self.uses = 0
        self._changes = changes
        self._read = -1
        self._rooms: dict[Kind, Rooms] = {}
        """Nodes that no waiting gang wants."""
        self._wanted: list[Rooms] = []
        """Nodes that one wants, by its turn."""
        self._filed: dict[int, Rooms] = {}
        self._room: dict[int, int] = {}
        """Room under which each node is filed there."""

    def rooms_for(self, turn: Turn) -> Iterable[Rooms]:
        """Return the nodes that an entry with that turn may use: no older gang wants them."""
        self._settle()
        if not self._wanted:
            return self._rooms.values()
        return [*self._rooms.values(), *self._wanted[bisect_left(self._wanted, turn, key=_wanted_from) :]]

    def is_closed_to(self, turn: Turn) -> bool:
        """Return whether an older entry waits for the first free nodes of this group."""
        return bool(self.closing) and min(self.closing.values()) < turn

    @property
    def free_places(self) -> int:
        """Free slots of all members that take more."""
        self._settle()
        return self._free

    def room_of(self, node: NodeEntry) -> int:
        """Return the room that a node of `rooms_for` is filed under."""
        return self._room[node.id]

    def add(self, node: NodeEntry) -> None:
        """Let a node belong to this group. Its change must be noted, unless the group is new."""
        self.members[node.id] = node
        node.groups += (self,)

    def discard(self, node: NodeEntry) -> None:
        self._take_out(node)
        node.groups = tuple(group for group in node.groups if group is not self)
        del self.members[node.id]

    def _settle(self) -> None:
        """File the nodes that have changed."""
        changes = self._changes
        unread = self._read - changes.forgotten
        self._read = changes.count
        if unread < 0 or len(changes.nodes) - unread > _MANY_CHANGES * len(self.members) + _MANY_CHANGES:
            for node in self.members.values():
                self._file(node, is_changed=False)
        elif unread < len(changes.nodes):
            changed: Iterable[NodeEntry] = changes.nodes[unread:]
            if len(changes.nodes) - unread > 1:
                changed = dict.fromkeys(changed)
            members = self.members
            for node in changed:
                if members.get(node.id) is node:
                    self._file(node, is_changed=True)

    def _file(self, node: NodeEntry, *, is_changed: bool) -> None:
        """Put a node where it belongs now: behind its equals, if it is known to have changed."""
        number, need = node.id, self.need
        rooms = self._filed.get(number)
        takes_more = node.is_up and node.is_reachable and not node.is_leaving
        if need is None and not node.is_booked:
            room = node.slots - len(node.sent) - node.gang_places
        else:
            room = node.room_for(need)
        if rooms is not None and takes_more and rooms.kind == node.kind:  # the common case: its room has changed
            before = self._room[number]
            if before == room and not is_changed:
                return
            rooms.move(node, before, room)
            if before > 0:
                self._free -= before
        else:
            self._take_out(node)
            if not takes_more:
                return
            rooms = self._filed[number] = self._rooms_of(node.kind)
            rooms.add(node, room)
        self._room[number] = room
        if room > 0:
            self._free += room

    def _take_out(self, node: NodeEntry) -> None:
        rooms = self._filed.pop(node.id, None)
        if rooms is None:
            return
        room = self._room.pop(node.id)
        rooms.discard(node, room)
        if not rooms.count:
            if rooms.kind[2] is None:
                del self._rooms[rooms.kind]
            else:
                self._wanted.remove(rooms)
        if room > 0:
            self._free -= room

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
