"""Places tasks on nodes.

    submit ──> queued ──Send──> sent ──finished──> gone
                 ^                │
                 └── returned ────┤  recalled before it began, or lost and worth another run
                                  └── failed ──> gone

A task may go to any node, or to those that it names. Nodes that are kept (for a role) take only what names them.
A node runs as many tasks as it has slots. While tasks are short a node is also sent some in advance, so that a slot
never waits for the network: one for each slot, and as many more as its slots end in the time of a round trip. Those are
recalled when another node falls idle. A gang starts only when all
its nodes have room for its ranks at once; from the moment it is first in the queue nothing new goes to those nodes, so
it cannot starve. A call that a task makes (`parent`) goes before all that wait, gangs too, for they may wait for that
very task; it is refused where it could never run, see `nested`. The owner feeds events and carries out the actions;
every method is called under the owner's lock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from .lines import Lines
from .nested import Family, NestedEntry, Places

__all__ = ["Action", "FailGang", "FailTask", "Recall", "Refuse", "Scheduler", "Send", "StartGang"]

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
_NOTHING_RESERVED: set[int] = set()


@dataclass(frozen=True, slots=True)
class Send:
    task: int
    node: int


@dataclass(frozen=True, slots=True)
class Recall:
    task: int
    node: int


@dataclass(frozen=True, slots=True)
class FailTask:
    """The task cannot be run (again). `started`: True, False, or None where nobody knows."""

    task: int
    node: int | None
    started: bool | None


@dataclass(frozen=True, slots=True)
class StartGang:
    gang: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailGang:
    """A gang that has not started can never start: it needs nodes that are gone."""

    gang: int
    node: int | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """A task or gang that a task has called can never start: tasks that wait for calls of their own hold all places."""

    call: int
    nodes: tuple[int, ...]


Action = Send | Recall | FailTask | StartGang | FailGang | Refuse


@dataclass(slots=True)
class _Task:
    id: int
    nodes: tuple[int, ...] | None  # it may go to; None: any that is not kept
    retries: int
    in_advance: bool = True  # may be sent before a slot is free
    node: int | None = None
    is_recalled: bool = False
    parent: int | None = None
    """The task or gang that has called it."""
    turn: tuple[int, int] = (0, 0)

    @property
    def line(self) -> Hashable:
        return self.nodes if self.parent is None else ("nested", self.nodes)


@dataclass(slots=True)
class _Gang:
    id: int
    nodes: tuple[int, ...] | None  # all of them; None: any one of `one_of`
    one_of: tuple[int, ...] | None  # None: of those that are not kept
    places: int  # on each node
    parent: int | None = None
    turn: tuple[int, int] = (0, 0)

    @property
    def line(self) -> Hashable:
        return self.parent is not None, self.nodes, self.one_of


@dataclass(slots=True)
class _Node:
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

    def most_ahead(self, mean_ns: float, *, is_known: bool) -> int:
        """How many tasks it is sent beyond its slots: none where they are long.

        Slots that began together end together: then each needs one.
        """
        is_short = is_known and mean_ns < SHORT_TASK_NS
        if not is_short and mean_ns >= _SHORT_ROUND_TRIPS * self.round_trip_ns:
            return 0
        on_the_way = self.slots * self.round_trip_ns / max(mean_ns, _LEAST_MEAN_NS)
        return min(max(_LEAST_AHEAD, self.slots) + math.ceil(on_the_way), max(_MOST_AHEAD, self.slots))

    @property
    def load(self) -> int:
        return len(self.sent) + self.gang_places

    def has_room_for(self, places: int) -> bool:
        # A gang may be larger than the node has slots: it then takes the whole node.
        return self.load + min(places, self.slots) <= self.slots


class Scheduler:
    """See the module. `slots` of node i are given when it comes up. `kept`: nodes that take only what names them."""

    def __init__(self, kept: frozenset[int] = frozenset()) -> None:
        self._kept = kept
        self._nodes: dict[int, _Node] = {}
        self._open: dict[int, _Node] = {}
        """Of those the ones that are not kept."""
        self._tasks: dict[int, _Task] = {}
        self._queue: Lines[_Task | _Gang] = Lines()
        self._gangs: dict[int, tuple[tuple[int, ...], int]] = {}
        self._family = Family()
        self._mean_ns = float(_FIRST_MEAN_NS)
        self._has_mean = False
        self._turn = 0

    def counts(self) -> tuple[int, int]:
        """(slots that have something to do, tasks and gangs that wait for a slot)."""
        busy = sum(min(node.load, node.slots) for node in self._nodes.values())
        ahead = sum(max(0, node.load - node.slots) for node in self._nodes.values())
        return busy, ahead + len(self._queue)

    # Events ---------------------------------------------------------------------------------------------------------

    def node_up(self, node: int, slots: int) -> list[Action]:
        self._nodes[node] = made = _Node(node, slots)
        if node not in self._kept:
            self._open[node] = made
        return self._place()

    def set_round_trip(self, node: int, round_trip_ns: float) -> list[Action]:
        """How long a frame to the node and its answer take; 0 at first, and on this machine."""
        if node not in self._nodes:
            return []
        self._nodes[node].round_trip_ns = round_trip_ns
        return self._place()

    def node_lost(self, node: int, *, will_return: bool) -> list[Action]:
        """The node is gone, and with it what was sent. `will_return`: another takes its number soon."""
        lost = self._nodes.get(node)
        if lost is None:
            return []
        actions: list[Action] = []
        for task_id in lost.sent:
            task = self._tasks[task_id]
            if task.retries > 0:
                task.retries -= 1
                self._return(task)
            else:
                self._forget(task_id)
                actions.append(FailTask(task_id, node, None))
        lost.sent.clear()
        lost.gang_places = 0
        lost.is_up = False
        for gang, (nodes, places) in self._gangs.items():  # its end must free nothing on the node's successor
            self._gangs[gang] = (tuple(n for n in nodes if n != node), places)
        if not will_return:
            del self._nodes[node]
            self._open.pop(node, None)
            actions += self._fail_unplaceable(node)
            actions += self._refuse_stuck()
        return actions + self._place()

    def node_leaving(self, node: int) -> list[Action]:
        """It will be gone soon. What it has not begun goes elsewhere; what is for it alone waits for its successor."""
        leaving = self._nodes.get(node)
        if leaving is None:
            return []
        leaving.is_leaving = True
        actions: list[Action] = []
        for task_id in reversed(leaving.sent):
            task = self._tasks[task_id]
            if (task.nodes is None or len(task.nodes) > 1) and task.in_advance and not task.is_recalled:
                task.is_recalled = True
                actions.append(Recall(task_id, node))
        return actions

    def is_idle(self, node: int) -> bool:
        """Whether nothing runs there, nor is on its way there."""
        known = self._nodes.get(node)
        return known is None or not known.load

    def node_paused(self, node: int) -> list[Action]:
        """The link to it is broken; it may come back, and what was sent may still end."""
        if node in self._nodes:
            self._nodes[node].is_reachable = False
        return []

    def node_resumed(self, node: int) -> list[Action]:
        if node in self._nodes:
            self._nodes[node].is_reachable = True
        return self._place()

    def submit(
        self,
        task: int,
        *,
        nodes: tuple[int, ...] | None = None,
        retries: int = 0,
        in_advance: bool = True,
        expected_ns: float | None = None,
        parent: int | None = None,
    ) -> list[Action]:
        """`nodes`: those that it may go to; None: any that is not kept. It waits for one of them to come back, and
        fails once all are gone for good. `in_advance` False: it is sent only when a slot is free, so that it begins
        when it is sent. `expected_ns`: how long it will take, where that is known before any has ended.
        `parent`: the task or gang that calls it, and that runs.
        """
        if expected_ns is not None and expected_ns < self._mean_ns:
            self._mean_ns, self._has_mean = expected_ns, True
        made = _Task(task, nodes, retries, in_advance and parent is None, parent=parent)
        if not self._open if nodes is None else self._are_gone(nodes):
            return [FailTask(task, nodes[0] if nodes else None, False)]
        self._tasks[task] = made
        if parent is not None:
            return self._submit_nested(made)
        if not self._queue.by_key:  # the common case: nothing waits, so it takes any room there is
            actions: list[Action] = []
            if not self._place_task(made, _NOTHING_RESERVED, actions):
                self._queue.append(made)
            return actions
        self._queue.append(made)
        return self._place()

    def submit_gang(
        self,
        gang: int,
        *,
        nodes: tuple[int, ...] | None,
        places: int,
        one_of: tuple[int, ...] | None = None,
        parent: int | None = None,
    ) -> list[Action]:
        """`nodes`: all of them; None: any one of `one_of`, or of those that are not kept. `places`: how many slots it
        takes on each.
        """
        made = _Gang(gang, nodes, one_of, places, parent)
        if self._cannot_start(made):
            wanted = nodes or one_of or ()
            return [FailGang(gang, next((n for n in wanted if n not in self._nodes), None))]
        if parent is not None:
            return self._submit_nested(made)
        self._queue.append(made)
        return self._place()

    def _submit_nested(self, made: _Task | _Gang) -> list[Action]:
        """It goes before all that wait. Where it cannot start, now or later, it is refused."""
        self._family.add(made.parent, made)
        self._queue.append(made, is_urgent=True)
        actions = self._place()
        return actions + self._refuse_stuck(made)

    def finished(self, task: int, elapsed_ns: int | None = None) -> list[Action]:
        """It ended, well or badly, and will not be run again."""
        if task not in self._tasks:
            return []
        if elapsed_ns is not None:
            self._mean_ns += _MEAN_WEIGHT * (elapsed_ns - self._mean_ns)
            self._has_mean = True
        self.drop(task)
        return self._place()

    def drop(self, task: int) -> None:
        """`finished`, and its place is given to nobody yet: the owner is about to tell of the loss of its node."""
        dropped = self._forget(task)
        if dropped is None:
            return
        if dropped.node is None:
            self._queue.remove(dropped)
        else:
            self._forget_sent(dropped)

    def lost(self, task: int, *, started: bool) -> list[Action]:
        """The slot died under the task (`started`), or the node gave it back unbegun."""
        returned = self._tasks.get(task)
        if returned is None or returned.node is None:
            return []
        node = returned.node
        self._forget_sent(returned)
        if not started or returned.retries > 0:
            returned.retries -= started
            self._return(returned)
            return self._place()
        self._forget(task)
        return [FailTask(task, node, True), *self._place()]

    def again(self, task: int) -> list[Action]:
        """Run a task that was sent once more (the owner counts why)."""
        sent = self._tasks[task]
        self._forget_sent(sent)
        self._return(sent)
        return self._place()

    def cancel(self, task: int) -> int | None:
        """Forget a task that is queued (None), or say on which node it is; there it stays until `finished`."""
        known = self._tasks.get(task)
        if known is None:
            return None
        if known.node is None:
            self._queue.remove(known)
            self._forget(task)
        return known.node

    def gang_finished(self, gang: int) -> list[Action]:
        """All its processes are gone; also for a gang that never started."""
        self._family.remove(gang)
        nodes, places = self._gangs.pop(gang, ((), 0))
        for number in nodes:
            node = self._nodes.get(number)
            if node is not None and node.is_up:
                node.gang_places = max(0, node.gang_places - min(places, node.slots))
        waiting = next((g for g in self._queue if isinstance(g, _Gang) and g.id == gang), None)
        if waiting is not None:
            self._queue.remove(waiting)
        return self._place()

    # Questions ------------------------------------------------------------------------------------------------------

    def node_of(self, task: int) -> int | None:
        known = self._tasks.get(task)
        return None if known is None else known.node

    def spend_retry(self, task: int) -> bool:
        """Take one of the task's retries; False if none is left."""
        known = self._tasks.get(task)
        if known is None or known.retries <= 0:
            return False
        known.retries -= 1
        return True

    @property
    def queued(self) -> int:
        return len(self._queue)

    # Placing --------------------------------------------------------------------------------------------------------

    def _place(self) -> list[Action]:
        actions: list[Action] = []
        queue = self._queue
        if queue.by_key:
            reserved: set[int] = set()
            closed: set[Hashable] = set()
            while self._has_room(reserved) and (entry := queue.oldest(closed)) is not None:
                if isinstance(entry, _Gang):
                    is_placed = self._place_gang(entry, reserved, actions)
                else:
                    is_placed = self._place_task(entry, reserved, actions)
                if is_placed:
                    queue.remove(entry)
                else:
                    closed.add(entry.line)
                    if isinstance(entry, _Task) and not entry.in_advance:
                        # No slot is free for it, and nothing that can wait on the node overtakes it.
                        reserved.update(self._open if entry.nodes is None else entry.nodes)
        if not queue.by_key:
            self._rebalance(actions)
        return actions

    def _has_room(self, reserved: set[int]) -> bool:
        return any(
            n.takes_more and n.load < n.slots + self._most_ahead(n) and n.id not in reserved
            for n in self._nodes.values()
        )

    def _most_ahead(self, node: _Node) -> int:
        return node.most_ahead(self._mean_ns, is_known=self._has_mean)

    def _place_task(self, task: _Task, reserved: set[int], actions: list[Action]) -> bool:
        node = self._pick(task.nodes, reserved, ahead=task.in_advance)
        if node is None:
            return False
        task.node = node.id
        task.is_recalled = False
        node.sent[task.id] = None
        actions.append(Send(task.id, node.id))
        return True

    def _candidates(self, nodes: tuple[int, ...] | None) -> list[_Node]:
        if nodes is None:
            return list(self._open.values())
        return [self._nodes[n] for n in nodes if n in self._nodes]

    def _pick(self, nodes: tuple[int, ...] | None, reserved: set[int], *, ahead: bool) -> _Node | None:
        """The node with most room, in turns among equals. `ahead`: a short task may go where slots are taken."""
        candidates = self._candidates(nodes)
        best: _Node | None = None
        best_room = 0
        count = len(candidates)
        for offset in range(count):
            node = candidates[(self._turn + offset) % count]
            room = node.slots - node.load
            has_room = room > 0 or (ahead and room > -self._most_ahead(node))
            if has_room and node.takes_more and node.id not in reserved and (best is None or room > best_room):
                best, best_room = node, room
        self._turn += 1
        return best

    def _place_gang(self, gang: _Gang, reserved: set[int], actions: list[Action]) -> bool:
        if gang.nodes is None:
            wanted = self._candidates(gang.one_of)
            free = [n for n in wanted if n.takes_more and n.id not in reserved and n.has_room_for(gang.places)]
            members = [min(free, key=lambda n: n.load)] if free else []
        else:
            wanted = members = self._candidates(gang.nodes)
            if len(members) < len(gang.nodes) or any(
                n.id in reserved or not n.takes_more or not n.has_room_for(gang.places) for n in members
            ):
                members = []
        if not members:
            reserved.update(n.id for n in wanted)
            return False
        for node in members:
            node.gang_places += min(gang.places, node.slots)
        numbers = tuple(n.id for n in members)
        self._gangs[gang.id] = (numbers, gang.places)
        actions.append(StartGang(gang.id, numbers))
        return True

    def _rebalance(self, actions: list[Action]) -> None:
        """Take back what waits on one node while a slot of another is idle. The answer is `lost(started=False)`."""
        has_idle = is_uneven = False
        for node in self._nodes.values():
            if node.takes_more:
                room = node.slots - node.load
                has_idle |= room > 0
                is_uneven |= room < 0
        if not has_idle or not is_uneven:
            return
        idle = {n.id: n.slots - n.load for n in self._nodes.values() if n.takes_more and n.slots > n.load}
        for node in self._nodes.values():
            excess = node.load - node.slots
            for task_id in reversed(node.sent):
                if excess <= 0 or not idle:
                    break
                excess -= 1
                task = self._tasks[task_id]
                if task.in_advance and not task.is_recalled and self._take_idle(idle, task.nodes):
                    task.is_recalled = True
                    actions.append(Recall(task_id, node.id))

    def _take_idle(self, idle: dict[int, int], nodes: tuple[int, ...] | None) -> bool:
        """Whether a slot of `idle` would do; if so, it is counted as taken."""
        for number in self._open if nodes is None else nodes:
            if number in idle:
                idle[number] -= 1
                if not idle[number]:
                    del idle[number]
                return True
        return False

    # Small steps ----------------------------------------------------------------------------------------------------

    def _forget_sent(self, task: _Task) -> None:
        node = self._nodes.get(task.node) if task.node is not None else None
        if node is not None:
            node.sent.pop(task.id, None)
        task.node = None

    def _forget(self, task: int) -> _Task | None:
        """It has left the books, whatever became of it."""
        known = self._tasks.pop(task, None)
        if known is not None and known.parent is not None:
            self._family.remove(task)
        return known

    def _return(self, task: _Task) -> None:
        task.node = None
        self._queue.append_left(task)

    def _are_gone(self, nodes: tuple[int, ...] | None) -> bool:
        """Whether no node is left, for good, that a task may go to."""
        return not self._open if nodes is None else not any(n in self._nodes for n in nodes)

    def _cannot_start(self, gang: _Gang) -> bool:
        if gang.nodes is None:
            return self._are_gone(gang.one_of)
        return any(n not in self._nodes for n in gang.nodes)

    def _fail_unplaceable(self, node: int) -> list[Action]:
        actions: list[Action] = []
        for entry in sorted(self._queue, key=lambda entry: entry.turn):
            if isinstance(entry, _Gang):
                if self._cannot_start(entry):
                    self._queue.remove(entry)
                    self._family.remove(entry.id)
                    actions.append(FailGang(entry.id, node))
            elif self._are_gone(entry.nodes):
                self._queue.remove(entry)
                self._forget(entry.id)
                actions.append(FailTask(entry.id, node, False))
        return actions

    # Calls of tasks -------------------------------------------------------------------------------------------------

    def _refuse_stuck(self, made: _Task | _Gang | None = None) -> list[Action]:
        """Of the calls of tasks that wait (or of `made` alone, if it does) those that can never start."""
        if not self._family:
            return []
        actions: list[Action] = []
        waiting = [e for e in self._queue if e.parent is not None] if made is None else [made]
        for entry in waiting:
            if self._has_begun(entry) or not self._family.is_stuck(entry, self._places()):
                continue
            self._queue.remove(entry)
            if isinstance(entry, _Task):
                self._forget(entry.id)
                nodes = tuple(n.id for n in self._candidates(entry.nodes))
            else:
                self._family.remove(entry.id)
                nodes = tuple(n.id for n in self._candidates(entry.nodes or entry.one_of))
            actions.append(Refuse(entry.id, nodes))
        return actions

    def _has_begun(self, entry: NestedEntry) -> bool:
        return entry.id in self._gangs or (isinstance(entry, _Task) and entry.node is not None)

    def _places(self) -> Places:
        """What the tasks and gangs that have called something hold, and what the calls that wait need."""
        held: dict[int, dict[int, int]] = {}
        for parent in self._family.parents():
            task = self._tasks.get(parent)
            if task is not None and task.node is not None:
                held[parent] = {task.node: 1}
            elif parent in self._gangs:
                numbers, places = self._gangs[parent]
                held[parent] = {n: min(places, self._nodes[n].slots) for n in numbers if n in self._nodes}
        return Places(
            slots={node.id: node.slots for node in self._nodes.values()},
            held=held,
            needs=self._needs,
        )

    def _needs(self, entry: NestedEntry) -> tuple[tuple[int, ...], int, bool] | None:
        """(nodes, places on each, whether on all of them) of a call that waits; None: it has begun."""
        if self._has_begun(entry):
            return None
        if isinstance(entry, _Gang):
            numbers = tuple(n.id for n in self._candidates(entry.nodes or entry.one_of))
            return numbers, entry.places, entry.nodes is not None
        assert isinstance(entry, _Task)
        return tuple(n.id for n in self._candidates(entry.nodes)), 1, False
