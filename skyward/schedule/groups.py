"""Nodes that the same calls may go to, ordered by their room, so that a choice among thousands takes no search.

A node is filed under its room, beside equals in the order in which they came there. Nodes of different kinds are filed
apart, because the kind decides how many tasks a node is sent in advance, and who may use it. There are few kinds: nodes
of one pool have the same slots, and round trips are rounded.

Calls that need different resources see different room on the same node, so each need has groups of its own. A node that
changes is filed only when the next choice is made in a group: a group that nobody asks costs next to nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .resources import PLAIN, Booking, Need, Stock

Turn = tuple[int, int]
"""Place in the order of all waiting entries; the lowest goes first."""
Kind = tuple[int, float, Turn | None, bool]
"""Slots, round trip in nanoseconds, the turn of the oldest waiting entry that wants the node, and whether its devices
are booked one by one."""

_LEAST_ROOM = -64


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
    wanted_by: dict[int, Turn] = field(default_factory=dict)
    """Turns of the waiting gangs that need this very node. Nothing newer may go here. The node may be filed as wanted
    later than that: when something newer looks for a node."""
    chosen_by: dict[int, Turn] = field(default_factory=dict)
    """Turns of the waiting entries that have chosen the node, although others would do. Nothing newer may go here.
    There are few such nodes, and they change all the time, so they are filed as any other."""
    groups: list[Group] = field(default_factory=list)
    kind: Kind = (0, 0.0, None, False)

    def __post_init__(self) -> None:
        self.set_kind()

    def set_kind(self) -> None:
        """Renew `kind` after a change of its parts."""
        turn = min(self.wanted_by.values()) if self.wanted_by else None
        self.kind = (self.slots, self.round_trip_ns, turn, self.stock is not None and self.stock.is_booked)

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

    def book(self, need: Need | None) -> Booking | None:
        """Take resources of the node. Call `NodeTable.refile` after it."""
        stock = self.stock
        if stock is None or (need is None and not stock.devices):
            return None
        booking = stock.book(PLAIN if need is None else need)
        if self.kind[3] != stock.is_booked:
            self.set_kind()
        return booking

    def release(self, booking: Booking | None) -> None:
        """Give resources back. Call `NodeTable.refile` after it."""
        stock = self.stock
        if stock is None or booking is None:
            return
        stock.release(booking)
        if self.kind[3] != stock.is_booked:
            self.set_kind()

    def is_withheld(self, turn: Turn) -> bool:
        """Return whether an older waiting entry keeps the node from an entry with that turn."""
        is_wanted = bool(self.wanted_by) and min(self.wanted_by.values()) < turn
        return is_wanted or self.is_chosen_before(turn) or any(g.is_closed_to(turn) for g in self.groups)

    def is_chosen_before(self, turn: Turn) -> bool:
        return bool(self.chosen_by) and min(self.chosen_by.values()) < turn


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


class Group:
    """Nodes that the same calls may go to.

    Args:
        numbers: The nodes; None for all that are not kept for a role.
        need: Resources of each call; None for a slot and its share. Nodes that can never hold them are left out.
    """

    __slots__ = ("_filed", "_free", "_rooms", "_stale", "_wanted", "closing", "members", "need", "numbers", "uses")

    def __init__(self, numbers: tuple[int, ...] | None, need: Need | None = None) -> None:
        self.numbers = numbers
        self.need = need
        self.members: dict[int, NodeEntry] = {}
        self.closing: dict[int, Turn] = {}
        """Turns of the waiting entries that go to the first free nodes of this group. Nothing newer may overtake them
        here."""
        self._free = 0
        self.uses = 0
        self._stale: dict[int, NodeEntry] = {}
        """Nodes to file again before the next choice."""
        self._rooms: dict[Kind, Rooms] = {}
        """Nodes that no waiting gang wants."""
        self._wanted: list[Rooms] = []
        """Nodes that one wants, by its turn."""
        self._filed: dict[int, tuple[Rooms, int]] = {}

    def rooms_for(self, turn: Turn) -> Iterable[Rooms]:
        """Return the nodes that an entry with that turn may use: no older gang wants them."""
        if self._stale:
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
        return self._filed[node.id][1]

    def add(self, node: NodeEntry) -> None:
        self.members[node.id] = node
        node.groups.append(self)
        self._stale[node.id] = node

    def discard(self, node: NodeEntry) -> None:
        self._stale.pop(node.id, None)
        self._take_out(node)
        node.groups.remove(self)
        del self.members[node.id]

    def refile(self, node: NodeEntry) -> None:
        """Have a node put into its new place, after a change of its room or state."""
        self._stale[node.id] = node

    def _settle(self) -> None:
        for node in self._stale.values():
            self._file(node)
        self._stale.clear()

    def _file(self, node: NodeEntry) -> None:
        """Put a node where it belongs now."""
        filed = self._filed.get(node.id)
        takes_more = node.takes_more
        need = self.need
        room = (
            node.slots - len(node.sent) - node.gang_places if need is None and not node.kind[3] else node.room_for(need)
        )
        if filed is not None and takes_more and filed[0].kind == node.kind:  # the common case: its room has changed
            rooms, before = filed
            rooms.move(node, before, room)
            if before > 0:
                self._free -= before
        else:
            self._take_out(node)
            if not takes_more:
                return
            rooms = self._rooms_of(node.kind)
            rooms.add(node, room)
        self._filed[node.id] = (rooms, room)
        if room > 0:
            self._free += room

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
