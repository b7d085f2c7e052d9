"""The scheduler beside a plain model that looks at each node and each waiting entry for every decision."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from skyward.schedule.actions import Action, Recall, Send, StartGang
from skyward.schedule.scheduler import Scheduler

KEPT = 4
"""The number of a node that takes only tasks that name it."""
SETS = [None, None, None, (0,), (1,), (2, 3), (0, 1), (0, 1, 2, 3), (KEPT,), (0, KEPT)]


@dataclass
class PlainNode:
    slots: int
    takes_more: bool = True
    load: dict[int, int] = field(default_factory=dict)
    """Places of each task and gang."""

    @property
    def room(self) -> int:
        return self.slots - sum(self.load.values())


@dataclass
class Waiting:
    number: int
    turn: tuple[int, int]
    nodes: tuple[int, ...] | None
    in_advance: bool = True
    places: int = 0
    """More than 0 for a gang."""
    needs_all: bool = False

    @property
    def line(self) -> object:
        return self.nodes, self.places > 0, self.needs_all


class Decisions(RuleBasedStateMachine):
    """Checks each decision to be the one that a search would have made, or as good: another node with equal room."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(frozenset({KEPT}))
        self.nodes: dict[int, PlainNode] = {}
        self.waiting: list[Waiting] = []
        self.known: dict[int, Waiting] = {}
        self.number = 0
        self.passed_over: set[object] = set()
        """Lines that an older entry kept from the nodes that they share."""

    @initialize(slots=st.lists(st.integers(1, 3), min_size=KEPT + 1, max_size=KEPT + 1))
    def begin(self, slots: list[int]) -> None:
        for number, count in enumerate(slots):
            self.nodes[number] = PlainNode(count)
            self.scheduler.node_up(number, count)
        self.scheduler.submit(-1)
        self.scheduler.finished(-1, 2_000_000)  # tasks are short

    # The plain model -------------------------------------------------------------------------------------------------

    def candidates(self, entry: Waiting) -> list[int]:
        return [n for n in self.nodes if n != KEPT] if entry.nodes is None else list(entry.nodes)

    def choices(self, entry: Waiting, reserved: set[int]) -> list[tuple[int, ...]]:
        """Return all equally good placements of an entry."""
        wanted = self.candidates(entry)
        open_nodes = [n for n in wanted if n not in reserved and self.nodes[n].takes_more]
        if entry.places:
            free = [n for n in open_nodes if self.nodes[n].room >= min(entry.places, self.nodes[n].slots)]
            if entry.needs_all:
                return [tuple(wanted)] if free == wanted else []
            return [(n,) for n in free]
        rooms = {n: self.nodes[n].room for n in open_nodes}
        most = {n: max(2, self.nodes[n].slots) if entry.in_advance else 0 for n in rooms}
        rooms = {n: room for n, room in rooms.items() if room > -most[n]}
        best = max(rooms.values(), default=0)
        if best <= 0 and entry.line in self.passed_over:  # a place in advance is worth no search
            best = -99
        return [(n,) for n, room in rooms.items() if room >= best]

    def check(self, actions: list[Action]) -> None:
        """Go through the waiting entries, oldest first, and compare."""
        placements = {a.task if isinstance(a, Send) else a.gang: a for a in actions if isinstance(a, Send | StartGang)}
        order = list(placements)
        while self.compare(placements, order):
            pass
        assert not placements, "placed although it should wait"
        for recall in actions:
            if isinstance(recall, Recall):
                assert not self.waiting
                assert self.nodes[recall.node].room < 0
                assert any(self.nodes[n].room > 0 for n in self.candidates(self.known[recall.task]))
        assert self.scheduler.queued == len(self.waiting)

    def compare(self, placements: dict[int, Send | StartGang], order: list[int]) -> bool:
        """Take off the placements that are as expected, and return whether some are left for another round.

        A place in advance that an older entry has kept from its line may be taken after newer entries were placed, or
        between them.
        """
        reserved: set[int] = set()
        blocked: set[object] = set()
        late: dict[int, tuple[Waiting, set[int]]] = {}
        is_closed = False
        comes_later, before = False, len(order)
        while entry := min((e for e in self.waiting if e.line not in blocked), key=lambda e: e.turn, default=None):
            if is_closed:
                self.passed_over.add(entry.line)
            choices = self.choices(entry, reserved)
            is_late = entry.in_advance and entry.line in self.passed_over
            if is_late and entry.number in placements and order[0] != entry.number:
                assert all(self.nodes[n].room <= 0 for (n,) in choices), "an older entry could have a free slot"
                comes_later = True
                blocked.add(entry.line)
                late[entry.number] = entry, set(reserved)
                continue
            action = placements.pop(entry.number, None)
            if action is not None:
                assert order.pop(0) == entry.number, "an older entry could be placed"
                self.place(entry, action.nodes if isinstance(action, StartGang) else (action.node,), choices)
                while order and order[0] in late:
                    passed, kept = late.pop(order.pop(0))
                    sent = placements.pop(passed.number)
                    assert isinstance(sent, Send)
                    self.place(passed, (sent.node,), self.choices(passed, kept))
                continue
            if choices:
                # Only a place in advance may be left out, after an older entry has waited for some of the same nodes.
                assert entry.line in self.passed_over, f"{entry} could go to {choices}"
                assert entry.in_advance
                assert all(self.nodes[n].room <= 0 for (n,) in choices)
            blocked.add(entry.line)
            if entry.places or not entry.in_advance:
                reserved.update(self.candidates(entry))
                is_closed |= not entry.needs_all
        return comes_later and len(order) < before

    def place(self, entry: Waiting, nodes: tuple[int, ...], choices: list[tuple[int, ...]]) -> None:
        assert nodes in choices
        self.waiting.remove(entry)
        for number in nodes:
            node = self.nodes[number]
            node.load[entry.number] = min(entry.places, node.slots) or 1

    # Events ----------------------------------------------------------------------------------------------------------

    def add(self, entry: Waiting) -> None:
        self.known[entry.number] = entry
        self.waiting.append(entry)

    @rule(nodes=st.sampled_from(SETS), in_advance=st.sampled_from([True, True, False]), count=st.integers(1, 6))
    def submit(self, nodes: tuple[int, ...] | None, in_advance: bool, count: int) -> None:
        for _ in range(count):
            self.number += 1
            self.add(Waiting(self.number, (1, self.number), nodes, in_advance))
            self.check(self.scheduler.submit(self.number, nodes=nodes, in_advance=in_advance))

    @rule(nodes=st.sampled_from(SETS), places=st.integers(1, 3), needs_all=st.booleans())
    def submit_gang(self, nodes: tuple[int, ...] | None, places: int, needs_all: bool) -> None:
        needs_all &= nodes is not None
        self.number += 1
        self.add(Waiting(self.number, (1, self.number), nodes, False, places, needs_all))
        required = nodes if needs_all else None
        one_of = None if needs_all else nodes
        self.check(self.scheduler.submit_gang(self.number, nodes=required, some_of=one_of, places=places))

    @precondition(lambda self: any(node.load for node in self.nodes.values()))
    @rule(data=st.data(), is_returned=st.sampled_from([False, False, False, True]))
    def end(self, data: st.DataObject, is_returned: bool) -> None:
        number = data.draw(st.sampled_from(sorted({n for node in self.nodes.values() for n in node.load})))
        entry = self.known[number]
        for node in self.nodes.values():
            node.load.pop(number, None)
        if entry.places:
            self.check(self.scheduler.gang_finished(number))
        elif is_returned:
            self.number += 1
            entry.turn = (0, -self.number)
            self.waiting.append(entry)
            self.check(self.scheduler.lost(number, started=False))
        else:
            self.check(self.scheduler.finished(number, 2_000_000))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(entry)
        if entry.places:
            self.check(self.scheduler.gang_finished(entry.number))
        else:
            assert self.scheduler.cancel(entry.number) is None
            if not entry.in_advance:  # those behind it may have places in advance now, which are worth no search
                self.passed_over.add(entry.line)

    @rule(number=st.integers(0, KEPT), is_up=st.booleans())
    def link(self, number: int, is_up: bool) -> None:
        self.nodes[number].takes_more = is_up
        if is_up:
            self.check(self.scheduler.node_resumed(number))
        else:  # nothing is placed, not even where a task that was cancelled has made way
            assert self.scheduler.node_paused(number) == []


TestDecisions = Decisions.TestCase
TestDecisions.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # making a failure smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
