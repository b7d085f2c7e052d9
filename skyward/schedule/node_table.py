"""Nodes as the scheduler sees them, and the choice of a node for the next task.

A node gets one task per slot, and while tasks are short some in advance. `NodeTable` learns how long tasks take.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import islice

from .groups import Changes, Entry, Group, Kind, NodeEntry, Rooms, TaskEntry, Turn
from .home import Home
from .resources import PLAIN, Booking, Need, Stock, Supply

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
_TINY_TASK_NS = 1_000_000
"""Running mean, in nanoseconds, below which a slot gets several tasks in advance, so that one write carries many."""
_TINY_WORK_NS = 4_000_000
"""Their work for each slot, in nanoseconds. The client's I/O thread may have to wait that long for the interpreter."""
_LEAST_TINY_NS = _TINY_WORK_NS / 256
"""Duration in nanoseconds below which a slot gets no more of them: 256."""
_MANY_AHEAD = 8
"""Number of them for each slot that are sent one by one as they come. More of them go together, after an event.

If each was sent by itself, a node that is as fast as its client would never have more, and nothing would go together.
"""
_FILLING_TASK_NS = 50_000_000
"""Running mean, in nanoseconds, up to which many tasks that come together fill one node after the other.

They share that node for a moment although others are idle. In return, one write and one read serve several of them.
"""
_LEAST_MEAN_NS = 16_000
"""Cost of the shortest task for its slot, overhead included: its agent takes 8 us for it, and the slot 4."""
_MEAN_WEIGHT = 0.2
_MOST_UNUSUAL = 8
"""Multiple of the usual duration that a longer task counts as. A busy machine stops a tiny one for milliseconds."""
_ROUND_TRIP_STEPS = 16
"""Steps between a round trip and its double. Rounded ones make few kinds of nodes; the error is 6 % at most."""
_MOST_CHANGES = 4
"""Most noted changes for each node, so that they stay short."""
_MANY_CHANGES = 1000
"""Number of noted changes that are always few."""
_UNUSED_GROUPS = 16
"""Groups that are kept although nothing waits for them, so that repeated calls do not build them again."""


def rounded(round_trip_ns: float) -> float:
    """Round a round trip up to one of a few values."""
    if round_trip_ns <= 0:
        return 0.0
    step = 2.0 ** math.floor(math.log2(round_trip_ns)) / _ROUND_TRIP_STEPS
    return math.ceil(round_trip_ns / step) * step


class NodeTable:
    """Nodes that are up or will return. `kept` nodes take only tasks that name them."""

    def __init__(self, kept: frozenset[int]) -> None:
        self._kept = kept
        self.by_id: dict[int, NodeEntry] = {}
        self._changes = Changes()
        self.open = Group(None, self._changes)
        """Nodes that are not kept."""
        self._groups: dict[tuple[tuple[int, ...] | None, Need | None], Group] = {(None, None): self.open}
        """All groups by their numbers and needs."""
        self._unused: OrderedDict[Group, None] = OrderedDict()
        self.closings = 0
        """Entries in `Group.closing` of all groups."""
        self.chosen = 0
        """Waiting entries that have chosen nodes."""
        self.booked = 0
        """Nodes whose devices are booked one by one."""
        self.home: Home | None = None
        """Node beside the scheduler, if short tasks go there first."""
        self._mean_ns = float(_FIRST_MEAN_NS)
        self._usual_ns = self._mean_ns
        """Running mean to which a task that takes much longer than usual adds little."""
        self._has_mean = False
        self._has_far_nodes = False

    def add(self, number: int, slots: int, supply: Supply | None = None, *, is_up: bool = True) -> NodeEntry:
        """Add a node, or make the replacement of a lost one take its number. An absent node keeps its supply."""
        node = self.by_id.get(number)
        if node is None:
            node = self.by_id[number] = NodeEntry(number, slots)
            self._changes.most = _MOST_CHANGES * len(self.by_id) + _MANY_CHANGES
        node.slots = slots
        node.is_up = is_up
        node.is_reachable = True
        node.is_leaving = False
        node.round_trip_ns = 0.0
        node.sent.clear()
        node.gang_places = 0
        if supply is None and not is_up and node.stock is not None:
            supply = node.stock.supply
        self.booked -= node.is_booked
        node.stock = None if supply is None else Stock(supply, slots)
        node.set_kind()
        for group in self._groups.values():
            self._join(node, group)
        self.refile(node)
        return node

    def _join(self, node: NodeEntry, group: Group) -> None:
        """Let a group have a node if its calls may go there."""
        is_named = node.id not in self._kept if group.numbers is None else node.id in group.numbers
        belongs = is_named and (group.need is None or node.can_hold(group.need))
        if belongs and node.id not in group.members:
            group.add(node)
        elif not belongs and node.id in group.members:
            group.discard(node)

    def remove(self, number: int) -> None:
        """Forget a node that will not return."""
        node = self.by_id.pop(number)
        for group in node.groups:
            group.discard(node)

    def refile(self, node: NodeEntry) -> None:
        """Put a node into its new places, after a change of its room or state."""
        self._changes.add(node)

    def book(self, node: NodeEntry, need: Need | None, devices: tuple[int, ...] | None = None) -> Booking | None:
        """Take resources of a node: these devices, or any. Call `refile` after it."""
        stock = node.stock
        if stock is None or (need is None and not stock.devices):
            return None
        booking = stock.book(PLAIN if need is None else need, devices)
        if stock.is_booked is not node.is_booked:
            node.set_kind()
            self.booked += 1 if node.is_booked else -1
        return booking

    def release(self, node: NodeEntry, booking: Booking) -> None:
        """Give resources of a node back. Call `refile` after it."""
        stock = node.stock
        if stock is None:
            return
        stock.release(booking)
        if stock.is_booked is not node.is_booked:
            node.set_kind()
            self.booked += 1 if node.is_booked else -1

    def set_round_trip(self, node: NodeEntry, round_trip_ns: float) -> None:
        node.round_trip_ns = rounded(round_trip_ns)
        self._has_far_nodes |= round_trip_ns > 0
        node.set_kind()
        self.refile(node)

    def candidates(self, numbers: tuple[int, ...] | None) -> list[NodeEntry]:
        """Return the nodes that a task may go to; None stands for all nodes that are not kept."""
        if numbers is None:
            return list(self.open.members.values())
        return [self.by_id[n] for n in numbers if n in self.by_id]

    def are_gone(self, numbers: tuple[int, ...] | None) -> bool:
        """Return whether all nodes that a task may go to are gone for good."""
        return not self.open.members if numbers is None else not any(n in self.by_id for n in numbers)

    def places_of(self, need: Need) -> float:
        """Return how many slots of an empty node a need is worth. All nodes of a pool are of one machine type."""
        node = next((node for node in self.by_id.values() if node.stock is not None), None)
        if node is None or node.stock is None:
            return max(1, need.slots)
        fits = Stock(node.stock.supply, node.slots).fits(need)
        return max(need.slots, node.slots / fits if fits > 0 else node.slots)

    # Groups ---------------------------------------------------------------------------------------------------------

    def group(self, numbers: tuple[int, ...] | None, need: Need | None = None) -> Group:
        """Return the group of these nodes and this need. It lasts while something holds it, and for some time after."""
        if numbers is None and need is None:
            return self.open
        group = self._groups.get((numbers, need))
        if group is None:
            group = self._groups[numbers, need] = Group(numbers, self._changes, need)
            for node in dict.fromkeys(self.candidates(numbers)):
                self._join(node, group)
            self._keep_unused(group)
        elif group in self._unused:
            self._unused.move_to_end(group)
        return group

    def group_of(self, entry: Entry) -> Group:
        """Return the group of the nodes that a call may go to, or needs."""
        if isinstance(entry, TaskEntry):
            return self.group(entry.nodes, entry.need)
        if entry.nodes is None:
            return self.group(entry.some_of, entry.need)
        return self.group(entry.nodes)

    def hold(self, group: Group) -> None:
        """Keep a group until `let_go`."""
        group.uses += 1
        self._unused.pop(group, None)

    def let_go(self, group: Group) -> None:
        group.uses -= 1
        if not group.uses and group is not self.open:
            self._keep_unused(group)

    def _keep_unused(self, group: Group) -> None:
        self._unused[group] = None
        if len(self._unused) > _UNUSED_GROUPS:
            oldest, _ = self._unused.popitem(last=False)
            del self._groups[oldest.numbers, oldest.need]
            for node in tuple(oldest.members.values()):
                oldest.discard(node)

    # How long tasks take --------------------------------------------------------------------------------------------

    @property
    def mean_s(self) -> float | None:
        """Mean duration of a task, in seconds; None before one has ended."""
        return self._mean_ns / 1e9 if self._has_mean else None

    def took(self, elapsed_ns: int) -> bool:
        """Record how long a task took. Return whether nodes may now take more in advance than before."""
        before, had_mean = self._mean_ns, self._has_mean
        self._mean_ns = now = before + _MEAN_WEIGHT * (elapsed_ns - before)
        self._has_mean = True
        self._usual_ns += _MEAN_WEIGHT * (min(elapsed_ns, _MOST_UNUSUAL * self._usual_ns) - self._usual_ns)
        if now < SHORT_TASK_NS and not (had_mean and before < SHORT_TASK_NS):
            return True
        return self._has_far_nodes and now < before and before > _LEAST_MEAN_NS

    def expect(self, expected_ns: float) -> bool:
        """Record an estimate for the next tasks, if it is below the running mean. Return whether it is."""
        if expected_ns < self._mean_ns:
            self._mean_ns, self._has_mean = expected_ns, True
            self._usual_ns = min(self._usual_ns, expected_ns)
            return True
        return False

    @property
    def _is_short(self) -> bool:
        return self._has_mean and self._mean_ns < SHORT_TASK_NS

    def most_ahead(self, kind: Kind, *, in_bulk: bool = True) -> int:
        """Return how many tasks a node of that kind gets beyond its slots; 0 if tasks are long.

        Slots that start together end together, so each slot needs a task in advance.
        """
        slots, round_trip_ns, _, is_booked = kind
        if is_booked:  # a place in advance would have no devices
            return 0
        if not self._is_short and self._mean_ns >= _SHORT_ROUND_TRIPS * round_trip_ns:
            return 0
        if not round_trip_ns:  # on this machine; a fast path, because this runs for each call
            if in_bulk and self._mean_ns < _TINY_TASK_NS:
                # In powers of two, so that the number stays the same while the mean changes with each task.
                tasks = int(_TINY_WORK_NS / max(self._mean_ns, _LEAST_TINY_NS))
                return slots << tasks.bit_length() - 1
            return max(_LEAST_AHEAD, slots)
        on_the_way = slots * round_trip_ns / max(self._mean_ns, _LEAST_MEAN_NS)
        return min(max(_LEAST_AHEAD, slots) + math.ceil(on_the_way), max(_MOST_AHEAD, slots))

    def has_many_ahead(self, node: NodeEntry) -> bool:
        """Return whether a near node has enough tiny tasks for more of them to wait for an event, and go together."""
        return self._mean_ns < _TINY_TASK_NS and -node.room >= _MANY_AHEAD * node.slots and not node.round_trip_ns

    def may_fill(self, node: NodeEntry, group: Group) -> bool:
        """Return whether a node that got a task takes another that comes with it, while nothing waits."""
        return (
            self._has_mean
            and self._mean_ns <= _FILLING_TASK_NS
            and node.room > 0
            and node.takes_more
            and not node.is_booked
            and node.id in group.members
        )

    # Room -----------------------------------------------------------------------------------------------------------

    def pick(
        self, group: Group, turn: Turn, *, ahead: bool, in_bulk: bool = True, least_ns: float = 0.0
    ) -> NodeEntry | None:
        """Return the node with the most room for a task, in turns among equals.

        Args:
            group: Nodes that the task may go to.
            turn: Turn of the task. Older waiting entries may keep nodes from it.
            ahead: Whether a free slot is not required.
            in_bulk: Whether it may be one of many that the node gets in advance.
            least_ns: Expected duration of the task, if that may be longer than the mean.
        """
        if self.closings and group.is_closed_to(turn):
            return None
        best: NodeEntry | None = None
        best_room = 0
        reach_ns = self._reach_ns(group, least_ns) if ahead else math.inf
        for rooms in group.rooms_for(turn):
            room = rooms.top
            if rooms.kind[1] > reach_ns or (best is not None and room <= best_room):
                continue
            if room > 0 or (ahead and room > -self.most_ahead(rooms.kind, in_bulk=in_bulk)):
                if not self.closings and not self.chosen:
                    best, best_room = rooms.first(room), room
                    continue
                least = 0 if not ahead or self.closings else -self.most_ahead(rooms.kind, in_bulk=in_bulk)
                node = self._first(rooms, turn, least)
                if node is not None and (best is None or group.room_of(node) > best_room):
                    best, best_room = node, group.room_of(node)
        if self.home is not None and reach_ns < math.inf:
            return self._at_home(self.home, best, best_room, group, turn, reach_ns, in_bulk=in_bulk)
        return best

    def is_withheld(self, node: NodeEntry, turn: Turn) -> bool:
        """Return whether an older waiting entry keeps a node from an entry with that turn."""
        if node.reserved_from < turn:
            return True
        return self.closings > 0 and any(group.closing and group.is_closed_to(turn) for group in node.groups)

    def has_place(self, node: NodeEntry, task: TaskEntry) -> bool:
        """Return whether a node has room for a task without numbers, now or in advance."""
        if self.home is not None and task.nodes is None and task.in_advance and self.leaves_out(node, task):
            return False
        room = node.room_for(None) if node.is_booked else node.room
        return room > 0 or (task.in_advance and room > -self.most_ahead(node.kind, in_bulk=task.in_bulk))

    # Home -----------------------------------------------------------------------------------------------------------

    def _reach_ns(self, group: Group, least_ns: float = 0.0) -> float:
        """Return the longest round trip of nodes that are worth a short task of this group; infinity if all are."""
        home = self.home
        if home is None or group is not self.open or not self._has_mean or self.closings or self.chosen:
            return math.inf
        return home.reach_ns(max(self._usual_ns, least_ns)) if home.node.id in group.members else math.inf

    def _at_home(
        self,
        home: Home,
        other: NodeEntry | None,
        room: int,
        group: Group,
        turn: Turn,
        reach_ns: float,
        *,
        in_bulk: bool,
    ) -> NodeEntry | None:
        """Return the home node, unless it has no place for a task, or another one within `reach_ns` has more room."""
        node = home.node
        has_place = node.room > 0 or node.room > -self.most_ahead(node.kind, in_bulk=in_bulk)
        if has_place and (other is None or node.room > room):
            other, room = node, node.room
        if room <= 0:
            far = [each for each in group.rooms_for(turn) if each.kind[1] > reach_ns]
            for rooms in far:
                if rooms.count > (rooms.kind == node.kind):  # not the home node alone
                    home.leave_out(rooms.kind[1])
        return other

    def leaves_out(self, node: NodeEntry, task: TaskEntry) -> bool:
        """Return whether a task that may go to any node rather waits for the home node than go to this one."""
        home = self.home
        if home is None or node is home.node or node.round_trip_ns <= self._reach_ns(self.open, task.least_ns):
            return False
        home.leave_out(node.round_trip_ns)
        return True

    def takes_back(self) -> bool:
        """Return whether nodes that were left out are worth a task by now, so that waiting ones must be tried."""
        home = self.home
        if home is None or not home.left_out_ns or home.left_out_ns > self._reach_ns(self.open):
            return False
        home.left_out_ns = 0.0
        return True

    @property
    def content(self) -> NodeEntry | None:
        """Node whose tasks in advance are not recalled, although others are idle: it runs them sooner."""
        home = self.home
        return home.node if home is not None and home.left_out_ns > self._reach_ns(self.open) else None

    def preferred(self, numbers: tuple[int, ...], group: Group, turn: Turn) -> NodeEntry | None:
        """Return the one of a few nodes with the most free slots for a task; None if none has one."""
        if self.closings and group.is_closed_to(turn):
            return None
        nodes = [group.members[number] for number in numbers if number in group.members]
        rooms = [
            (node.room_for(group.need), node) for node in nodes if node.takes_more and not self.is_withheld(node, turn)
        ]
        room, node = max(rooms, key=lambda pair: pair[0], default=(0, None))
        return node if room > 0 else None

    def _first(self, rooms: Rooms, turn: Turn, least: int) -> NodeEntry | None:
        """Return the node with the most room, but more than `least`, that no older entry keeps from this one.

        While groups are closed, only free slots are searched. A place in advance is worth no search then: the task is
        tried again when a slot of its nodes falls free.
        """
        top = rooms.top
        node = rooms.first(top)
        if not self._is_kept(node, turn):
            return node
        lower = (room for room in sorted(rooms.by_room, reverse=True) if room > least)
        return next((n for room in lower for n in rooms.at(room) if not self._is_kept(n, turn)), None)

    def _is_kept(self, node: NodeEntry, turn: Turn) -> bool:
        return self.is_withheld(node, turn) if self.closings else node.is_chosen_before(turn)

    def pick_some(self, group: Group, turn: Turn, count: int) -> list[NodeEntry]:
        """Return that many nodes with room for an entry, those with the most room; none if there are too few."""
        if self.closings and group.is_closed_to(turn):
            return []
        chosen: list[tuple[int, NodeEntry]] = []
        for rooms in group.rooms_for(turn):
            free = ((room, node) for room in sorted(rooms.by_room, reverse=True) if room > 0 for node in rooms.at(room))
            chosen += islice((pair for pair in free if not self.is_withheld(pair[1], turn)), count)
        chosen.sort(key=lambda pair: -pair[0])
        nodes = [node for _, node in chosen[:count]] if len(chosen) >= count else []
        return sorted(nodes, key=lambda node: node.id)

    def pick_to_reserve(self, group: Group, turn: Turn, count: int) -> tuple[NodeEntry, ...]:
        """Return the nodes that lack least for an entry, or none if older entries or actors keep too many from it."""
        chosen: list[tuple[int, NodeEntry]] = []
        need = group.need or PLAIN
        for rooms in group.rooms_for(turn):
            nodes = ((room, node) for room in sorted(rooms.by_room, reverse=True) for node in rooms.at(room))
            free = (pair for pair in nodes if not pair[1].is_chosen_before(turn) and pair[1].can_clear(need))
            chosen += islice(free, count)
        chosen.sort(key=lambda pair: -pair[0])
        return tuple(node for _, node in chosen[:count]) if len(chosen) >= count else ()
