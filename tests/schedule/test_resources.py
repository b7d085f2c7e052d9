"""Resources of calls: nothing is handed out twice, nothing starves, gangs get all of their nodes or none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from skyward.accelerators import Accelerator
from skyward.schedule.actions import Action, Recall, Refuse, Send, Settle, StartGang, Unsettle
from skyward.schedule.resources import UNIT, Need, Stock, Supply
from skyward.schedule.scheduler import Scheduler

NEEDS = [
    None,
    None,
    Need(devices=0),
    Need(devices=250),
    Need(devices=1 * UNIT),
    Need(devices=2 * UNIT),
    Need(devices=4 * UNIT),
    Need(cpus=500),
    Need(cpus=3 * UNIT),
    Need(memory_mib=3000, cpus=1 * UNIT),
    Need(devices=1 * UNIT, cpus=2 * UNIT),
]
SETS = st.sampled_from([None, None, None, None, (0,), (1,), (0, 1), (1, 2, 3)])
"""Nodes that a task or an actor may go to."""
SUPPLIES = [
    Supply(cpus=4, memory_gib=8),
    Supply(cpus=2, memory_gib=4, devices=("A100",)),
    Supply(cpus=8, memory_gib=16, devices=("A100",) * 4),
    Supply(cpus=8, memory_gib=16, devices=("A100",) * 3),
]


@dataclass
class ModelNode:
    slots: int
    supply: Supply
    load: dict[int, tuple[int, Need, tuple[int, ...] | None]] = field(default_factory=dict)
    """Places, need and devices of each task and gang, in the order of sending."""

    def check(self) -> None:
        cpus = sum(need.cpus for _, need, _ in self.load.values())
        memory = sum(need.memory_mib for _, need, _ in self.load.values())
        assert cpus <= self.supply.cpus * UNIT
        assert memory <= self.supply.memory_gib * 1024
        # Actors that have all devices leave calls without any, which may be sent in advance.
        places = sum(places for places, _, devices in self.load.values() if devices != ())
        has_bookings = any(devices for _, _, devices in self.load.values())
        assert places <= self.slots or not has_bookings, "sent in advance beside bookings"
        own = [devices for _, need, devices in self.load.values() if devices is None is need.devices and need.slots]
        booked = [(need, devices) for _, need, devices in self.load.values() if devices]
        if self.supply.devices:
            assert not (own and booked), "devices of slots, and the same devices booked"
        whole, shares = Counter[int](), Counter[int]()
        for need, devices in booked:
            assert len(set(devices or ())) == len(devices or ()), "the same device twice"
            for index in devices or ():
                assert 0 <= index < len(self.supply.devices)
                if need.devices is not None and need.devices < UNIT:
                    shares[index] += need.devices
                elif need.devices is not None:
                    whole[index] += 1
        assert all(count == 1 for count in whole.values()), "a device was handed out twice"
        assert not (whole.keys() & shares.keys())
        assert all(part <= UNIT for part in shares.values())

    def has_room(self, need: Need) -> bool:
        """Return whether a need fits for certain. A share of devices that are in use may fit, but is not counted."""
        if not self.load:
            return Stock(self.supply, self.slots).fits(need) > 0
        slots = min(need.slots, self.slots)
        if slots > self.slots - sum(places for places, _, _ in self.load.values()):
            return False
        if need.cpus > self.supply.cpus * UNIT - sum(other.cpus for _, other, _ in self.load.values()):
            return False
        if need.memory_mib > self.supply.memory_gib * 1024 - sum(n.memory_mib for _, n, _ in self.load.values()):
            return False
        if not self.supply.devices or need.devices == 0:
            return not need.devices
        if need.devices is None or any(
            own is None is other.devices and other.slots for _, other, own in self.load.values()
        ):
            return False
        used = {index for _, _, devices in self.load.values() for index in devices or ()}
        return len(self.supply.devices) - len(used) >= max(1, need.devices // UNIT)


@dataclass
class Waiting:
    """Call that waits."""

    need: Need
    count: int = 0
    """Nodes of a gang; 0 for a task or an actor."""
    nodes: tuple[int, ...] | None = None
    """Nodes that it may go to; None for any."""
    needs_all: bool = False
    turn: float = 0.0


class Resources(RuleBasedStateMachine):
    """Follows each decision, and checks in the end that everything could run."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.nodes: dict[int, ModelNode] = {}
        self.waiting: dict[int, Waiting] = {}
        self.sent: dict[int, Waiting] = {}
        self.number = 0
        self.events = 0
        self.away: set[int] = set()
        """Nodes whose link is broken."""

    @initialize(
        slots=st.integers(1, 4),
        supplies=st.lists(st.sampled_from(SUPPLIES), min_size=2, max_size=5),
        short=st.booleans(),
    )
    def begin(self, slots: int, supplies: list[Supply], short: bool) -> None:
        for number, supply in enumerate(supplies):
            self.nodes[number] = ModelNode(slots, supply)
            self.scheduler.node_up(number, slots, supply)
        if short:
            self.wait(Waiting(Need()))
            self.follow(self.scheduler.submit(self.number))
            self.end_one(self.number)

    def wait(self, call: Waiting) -> None:
        self.number += 1
        call.turn = self.number
        self.waiting[self.number] = call

    def follow(self, actions: list[Action], *, has_settled: bool = True) -> None:
        """Carry out actions. `has_settled`: all calls that can be placed are placed now."""
        for action in actions:
            if isinstance(action, Send):
                self.take(action.task, (action.node,), (action.devices,))
            elif isinstance(action, StartGang):
                call = self.waiting[action.gang]
                assert len(set(action.nodes)) == len(action.nodes) == call.count, "a gang without all of its nodes"
                assert not call.needs_all or action.nodes == call.nodes
                self.take(action.gang, action.nodes, action.devices or (None,) * call.count)
            elif isinstance(action, Settle):
                self.take(action.actor, (action.node,), (action.devices,))
            elif isinstance(action, Refuse | Unsettle):
                assert action.why
                del self.waiting[action.call if isinstance(action, Refuse) else action.actor]
                has_settled &= len(actions) > 1
            elif isinstance(action, Recall):
                self.nodes[action.node].load.pop(action.task)
                call = self.waiting[action.task] = self.sent[action.task]
                call.turn = -self.events
                self.follow(self.scheduler.lost(action.task, started=False), has_settled=False)
        self.events += 1
        for node in self.nodes.values():
            node.check()
        for number in self.waiting:
            assert self.scheduler.why_waiting(number).startswith("waits for ")
        if has_settled:
            self.check_waiting()

    def take(self, number: int, nodes: tuple[int, ...], devices: tuple[tuple[int, ...] | None, ...]) -> None:
        call = self.sent[number] = self.waiting.pop(number)
        for node, own in zip(nodes, devices, strict=True):
            model = self.nodes[node]
            assert call.nodes is None or node in call.nodes
            model.load[number] = min(call.need.slots, model.slots), call.need, own
            self.check_devices(model, call.need, own)

    def check_waiting(self) -> None:
        """Check that no call waits while it has room, unless older calls may go to the same nodes."""
        kept: set[int] = set()
        for call in sorted(self.waiting.values(), key=lambda call: call.turn):
            nodes = set(self.nodes if call.nodes is None else call.nodes)
            free = [n for n in nodes - kept if n not in self.away and self.nodes[n].has_room(call.need)]
            needed = len(nodes) if call.needs_all else max(1, call.count)
            assert len(free) < needed, f"{call} waits, but nodes {free} have room"
            kept |= nodes

    def check_devices(self, node: ModelNode, need: Need, devices: tuple[int, ...] | None) -> None:
        if not node.supply.devices:
            assert devices is None
        elif need.devices == 0:
            assert devices == ()
        elif need.devices is not None:
            assert devices is not None
            assert len(devices) == max(1, need.devices // UNIT)

    def some(self, nodes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return those of the nodes that exist; None if it is none of them."""
        return tuple(n for n in nodes or () if n in self.nodes) or None

    @rule(need=st.sampled_from(NEEDS), count=st.integers(1, 4), nodes=SETS, in_advance=st.booleans())
    def submit(self, need: Need | None, count: int, nodes: tuple[int, ...] | None, in_advance: bool) -> None:
        nodes = self.some(nodes)
        for _ in range(count):
            self.wait(Waiting(need or Need(), nodes=nodes))
            self.follow(self.scheduler.submit(self.number, nodes=nodes, need=need, in_advance=in_advance))

    @rule(need=st.sampled_from(NEEDS), places=st.integers(1, 3), count=st.integers(1, 3), is_certain=st.booleans())
    def submit_gang(self, need: Need | None, places: int, count: int, is_certain: bool) -> None:
        count = min(count, len(self.nodes))
        nodes = tuple(range(count)) if is_certain else None
        self.wait(Waiting((need or Need())._replace(slots=places, is_gang=True), count, nodes, is_certain))
        self.follow(self.scheduler.submit_gang(self.number, nodes=nodes, places=places, count=count, need=need))

    @rule(need=st.sampled_from([need for need in NEEDS if need is not None]), nodes=SETS)
    def submit_actor(self, need: Need, nodes: tuple[int, ...] | None) -> None:
        self.wait(Waiting(need._replace(slots=0), nodes=self.some(nodes)))
        self.follow(self.scheduler.submit_actor(self.number, nodes=self.some(nodes), need=need))

    @precondition(lambda self: any(node.load for node in self.nodes.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_one(data.draw(st.sampled_from(sorted({n for node in self.nodes.values() for n in node.load}))))

    def end_one(self, number: int) -> None:
        places = [node.load.pop(number) for node in self.nodes.values() if number in node.load]
        if places[0][1].is_gang:
            self.follow(self.scheduler.gang_finished(number))
        elif not places[0][1].slots:
            self.follow(self.scheduler.actor_gone(number))
        else:
            self.follow(self.scheduler.finished(number, 2_000_000))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        need = self.waiting.pop(number).need
        if need.is_gang or not need.slots:
            self.follow(self.scheduler.gang_finished(number))
        else:
            assert self.scheduler.cancel(number) is None

    @rule(number=st.integers(0, 4), is_up=st.booleans())
    def link(self, number: int, is_up: bool) -> None:
        if is_up:
            self.away.discard(number)
            self.follow(self.scheduler.node_resumed(number))
        else:
            self.away.add(number)
            self.follow(self.scheduler.node_paused(number), has_settled=False)

    @rule(data=st.data(), supply=st.sampled_from(SUPPLIES))
    def replace(self, data: st.DataObject, supply: Supply) -> None:
        number = data.draw(st.sampled_from(sorted(self.nodes)))
        node = self.nodes[number]
        gangs = [n for n, (_, need, _) in node.load.items() if need.is_gang or not need.slots]
        node.load.clear()
        self.away.add(number)
        self.follow(
            [a for a in self.scheduler.node_lost(number, will_return=True) if isinstance(a, Send | StartGang | Settle)]
        )
        for gang in gangs:
            for other in self.nodes.values():
                other.load.pop(gang, None)
            self.follow(self.scheduler.gang_finished(gang))
        node.supply = supply
        self.away.discard(number)
        self.follow(self.scheduler.node_up(number, node.slots, supply))

    def teardown(self) -> None:
        """Let everything end. Under a flood of small calls, each waiting call still gets its turn."""
        for number in self.nodes:
            self.away.discard(number)
            self.follow(self.scheduler.node_resumed(number))
        waiting = sorted(self.waiting)
        flood = 0
        while any(number in self.waiting for number in waiting):
            flood += 1
            assert flood < 3000, f"starved: {[self.scheduler.why_waiting(n) for n in waiting if n in self.waiting]}"
            self.submit(NEEDS[flood % 4], 1, None, True)
            running = sorted({n for node in self.nodes.values() for n in node.load})
            assert running, "calls wait, and nothing runs"
            # Newer small calls end last, so that only reserved nodes give a large one its place.
            self.end_one(running[0])
            if flood % 3 == 0 and len(running) > 1:
                self.end_one(running[1])
        while running := sorted({n for node in self.nodes.values() for n in node.load}):
            self.end_one(running[0])
        assert not self.waiting


TestResources = Resources.TestCase
TestResources.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # making a failure smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)

A100 = Supply(cpus=8, memory_gib=32, devices=("NVIDIA A100-SXM4-80GB",) * 8)


def test_shares_are_packed_on_few_devices() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 8, A100)
    quarter = Need(devices=250)
    sent = [scheduler.submit(task, need=quarter) for task in range(5)]
    assert sent == [[Send(task, 0, (task // 4,))] for task in range(5)]
    assert scheduler.submit(9, need=Need(devices=6 * UNIT)) == [Send(9, 0, (2, 3, 4, 5, 6, 7))]


def test_plain_calls_and_booked_devices_never_overlap() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 4, A100)
    assert scheduler.submit(1) == [Send(1, 0, None)], "the devices of its slot"
    assert scheduler.submit(2, need=Need(devices=UNIT)) == []
    assert scheduler.why_waiting(2) == "waits for 1 GPU: 1 call without a number of GPUs must end first"
    assert scheduler.finished(1) == [Send(2, 0, (0,))]
    assert scheduler.submit(3) == [Send(3, 0, (2, 3))], "the share of a slot"
    assert scheduler.submit(4, need=Need(devices=0)) == [Send(4, 0, ())]
    scheduler.finished(2)
    scheduler.finished(3)
    assert scheduler.submit(5) == [Send(5, 0, None)]


def test_gangs_on_one_node_get_devices_of_their_own() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 2, A100)
    assert scheduler.submit_gang(1, nodes=(0,), places=1) == [StartGang(1, (0,), ((0, 1, 2, 3),))]
    assert scheduler.submit_gang(2, nodes=(0,), places=1) == [StartGang(2, (0,), ((4, 5, 6, 7),))]


@pytest.mark.parametrize(
    ("need", "count", "words"),
    [
        (Need(devices=16 * UNIT), 1, "no node can ever hold 16 GPUs; the nodes have 2 x (8 NVIDIA A100-SXM4-80GB"),
        (Need(cpus=9 * UNIT), 1, "no node can ever hold 9 CPUs"),
        (Need(devices=UNIT, accelerator=Accelerator("H100")), 1, "no node can ever hold 1 H100 GPU"),
        (Need(devices=UNIT), 3, "3 nodes with 1 GPU each, but 2 can hold that"),
    ],
)
def test_a_need_that_no_node_can_hold_is_refused_with_what_there_is(need: Need, count: int, words: str) -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 1, A100)
    scheduler.node_up(1, 1, A100)
    (refused,) = scheduler.submit_gang(1, nodes=None, places=1, count=count, need=need)
    assert isinstance(refused, Refuse)
    assert words in refused.why
    assert scheduler.queued == 0


@pytest.mark.parametrize(("mib", "said"), [(102, "0.0996"), (1536, "1.5"), (10_000 * 1024, "10000")])
def test_memory_is_shown_in_plain_digits(mib: int, said: str) -> None:
    assert Need(memory_mib=mib).each == f"{said} GiB of memory"


def test_a_call_waits_for_a_node_that_is_not_there_and_is_refused_if_that_has_too_little() -> None:
    scheduler = Scheduler()
    scheduler.node_absent(0, 1)
    assert scheduler.submit(1, need=Need(devices=UNIT)) == []
    assert scheduler.why_waiting(1) == "waits for a node: those that it may go to are not there"
    (refused,) = scheduler.node_up(0, 1, Supply(cpus=2, memory_gib=4))
    assert isinstance(refused, Refuse)
    assert "1 x (no GPU, 2 CPUs, 4.0 GiB)" in refused.why


def test_a_waiting_call_says_what_it_lacks() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 4, A100)
    scheduler.submit(1, need=Need(devices=7 * UNIT, cpus=6 * UNIT))
    scheduler.submit(2, need=Need(devices=2 * UNIT))
    scheduler.submit(3, need=Need(devices=2 * UNIT))
    scheduler.submit(4, need=Need(cpus=4 * UNIT))
    scheduler.submit_gang(5, nodes=None, places=1, count=1, need=Need(memory_mib=33 * 1024))
    assert scheduler.why_waiting(1) == ""
    assert scheduler.why_waiting(2) == "waits for 2 GPUs: 1 free"
    assert scheduler.why_waiting(3) == "waits for 2 GPUs: 1 free, behind older calls"
    assert scheduler.why_waiting(4) == "waits for 4 CPUs: 2 free"
    assert scheduler.why_oldest() == "waits for 2 GPUs: 1 free"


def test_a_nested_call_that_needs_the_devices_of_its_caller_is_refused() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 2, Supply(cpus=4, memory_gib=8, devices=("A100",)))
    assert scheduler.submit(1, need=Need(devices=UNIT)) == [Send(1, 0, (0,))]
    assert scheduler.submit(2, need=Need(devices=UNIT), parent=1) == [Refuse(2, (0,))]
    assert scheduler.submit(3, need=Need(devices=0), parent=1) == [Send(3, 0, ())]


def test_a_large_call_is_not_overtaken_by_small_ones_forever() -> None:
    scheduler = Scheduler()
    for node in range(3):
        scheduler.node_up(node, 4, A100)
    running = []
    for task in range(12):
        running += [a.task for a in scheduler.submit(task, need=Need(devices=2 * UNIT)) if isinstance(a, Send)]
    scheduler.submit(100, need=Need(devices=8 * UNIT))
    for task in range(1000, 1040):  # newer ones may go anywhere but to the node that is kept for it
        scheduler.submit(task, need=Need(devices=2 * UNIT))
        actions = scheduler.finished(running.pop(0))
        started = [a.task for a in actions if isinstance(a, Send)]
        running += started
        if 100 in started:
            return
    pytest.fail("the large call starved")


def test_calls_run_beside_actors_with_the_devices_that_these_leave() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 3, Supply(cpus=8, memory_gib=16, devices=("A100",) * 4))
    assert scheduler.submit(1) == [Send(1, 0, None)]
    assert scheduler.submit_actor(2, nodes=None, need=Need(devices=UNIT)) == []
    assert scheduler.why_waiting(2) == "waits for 1 GPU: 1 call without a number of GPUs must end first"
    assert scheduler.finished(1) == [Settle(2, 0, (0,))]
    assert scheduler.submit(3) == [Send(3, 0, (1,))]
    scheduler.finished(3)
    assert scheduler.submit_actor(4, nodes=None, need=Need(devices=3 * UNIT)) == [Settle(4, 0, (1, 2, 3))]
    assert scheduler.submit(5) == [Send(5, 0, ())], "it runs, but without a device"
    assert scheduler.submit(6, need=Need(devices=UNIT)) == []
    assert scheduler.why_waiting(6) == "waits for 1 GPU: 0 free, actors hold 4"
    assert scheduler.submit_actor(7, nodes=None, need=Need(devices=UNIT)) == []
    assert scheduler.submit(8) == [Send(8, 0, ())], "calls that wait for the end of an actor keep nobody waiting"
    assert scheduler.actor_gone(2) == [Send(6, 0, (0,))]
    assert scheduler.finished(6) == [Settle(7, 0, (0,))]
    assert scheduler.actor_gone(7) == []
    assert scheduler.actor_gone(4) == []
    scheduler.finished(5)
    scheduler.finished(8)
    assert scheduler.submit(9) == [Send(9, 0, None)], "nothing is booked any longer"


def test_an_actor_waits_for_a_node_and_is_refused_if_none_can_hold_it() -> None:
    scheduler = Scheduler()
    scheduler.node_absent(0, 1)
    assert scheduler.submit_actor(1, nodes=None, need=Need(devices=2 * UNIT)) == []
    assert scheduler.demand(resting={0}).waiting == 1
    assert scheduler.node_up(0, 1, Supply(cpus=1, memory_gib=1, devices=("L4",) * 2)) == [Settle(1, 0, (0, 1))]
    assert scheduler.demand(resting=()).needed(1) == 1, "a waiting call needs another node"
    (refused,) = scheduler.submit_actor(2, nodes=(0,), need=Need(cpus=2 * UNIT))
    assert isinstance(refused, Unsettle)
    assert refused.why.startswith("no node can ever hold 2 CPUs")
    scheduler.submit_actor(3, nodes=(0,), need=Need(devices=UNIT))
    gone = "no node is left that it may live on; make it on another node, or open a new pool"
    assert scheduler.node_lost(0, will_return=False) == [Unsettle(3, gone)]
    assert scheduler.submit_actor(4, nodes=(0,), need=Need(devices=UNIT)) == [Unsettle(4, gone)]


def test_a_gang_on_the_node_of_an_actor_keeps_nobody_waiting_for_the_end_of_that() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 1, Supply(cpus=2, memory_gib=4, devices=("L4",) * 2))
    scheduler.submit_actor(1, nodes=None, need=Need(devices=UNIT))
    assert scheduler.submit_gang(2, nodes=(0,), places=1, need=Need(devices=2 * UNIT)) == []
    assert scheduler.submit(3) == [Send(3, 0, (1,))]
    assert scheduler.submit(4) == []
    assert scheduler.finished(3) == [Send(4, 0, (1,))]
    assert scheduler.actor_gone(1) == []
    assert scheduler.submit(5) == [], "now the gang has its turn first"
    assert scheduler.finished(4) == [StartGang(2, (0,), ((0, 1),))]


def test_nodes_that_fall_free_together_go_to_the_oldest_calls() -> None:
    scheduler = Scheduler()
    gpu = Need(devices=UNIT)
    for node in range(2):
        scheduler.node_up(node, 1, Supply(cpus=2, memory_gib=4, devices=("L4",)))
    assert scheduler.submit_gang(1, nodes=(0, 1), places=1) == [StartGang(1, (0, 1), ((0,), (0,)))]
    assert scheduler.submit(2, nodes=(1,), need=gpu) == []
    assert scheduler.submit(3, need=gpu) == []
    assert scheduler.submit_gang(4, nodes=(0, 1), places=1) == []
    assert scheduler.submit(5, need=gpu) == []
    assert scheduler.gang_finished(1) == [Send(2, 1, (0,)), Send(3, 0, (0,))]
    assert scheduler.finished(3) == [], "the gang has its turn before the newest call"
    assert scheduler.finished(2) == [StartGang(4, (0, 1), ((0,), (0,)))]
    assert scheduler.gang_finished(4) == [Send(5, 0, (0,))]


def test_a_gang_that_no_longer_fits_is_refused_behind_another_for_the_same_nodes() -> None:
    """The state machine found it in 40 steps: both gangs shared a line, and only its first was checked."""
    scheduler = Scheduler()
    scheduler.node_up(0, 1, Supply(cpus=4, memory_gib=8))
    scheduler.submit(1)
    assert scheduler.submit_gang(2, nodes=(0,), places=1) == []
    assert scheduler.submit_gang(3, nodes=(0,), places=1, need=Need(cpus=3 * UNIT)) == []
    scheduler.node_lost(0, will_return=True)
    refused, started = scheduler.node_up(0, 1, Supply(cpus=2, memory_gib=4))
    assert isinstance(refused, Refuse)
    assert refused.call == 3
    assert started == StartGang(2, (0,))
    assert scheduler.submit(4) == []
    assert scheduler.gang_finished(2) == [Send(4, 0)], "the node is not kept for the other gang"


def test_a_gang_does_not_wait_behind_one_that_needs_more_of_the_same_nodes() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 2, Supply(cpus=2, memory_gib=4, devices=("L4",) * 2))
    scheduler.submit_actor(1, nodes=None, need=Need(devices=UNIT))
    assert scheduler.submit_gang(2, nodes=(0,), places=1, need=Need(devices=2 * UNIT)) == []
    assert scheduler.submit_gang(3, nodes=(0,), places=1, need=Need(devices=UNIT)) == [StartGang(3, (0,), ((1,),))]


def test_a_call_goes_when_an_older_one_that_kept_it_from_a_free_slot_is_placed_elsewhere() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 1, Supply(cpus=2, memory_gib=4))
    scheduler.node_up(1, 2, Supply(cpus=2, memory_gib=4, devices=("L4",)))
    assert scheduler.submit(1, nodes=(0,)) == [Send(1, 0)]
    assert scheduler.submit(2, nodes=(1,)) == [Send(2, 1)]
    assert scheduler.submit(3, nodes=(1,)) == [Send(3, 1)]
    assert scheduler.submit(4, nodes=(1,), need=Need(devices=UNIT)) == []
    assert scheduler.submit(5, nodes=(0, 1), in_advance=False) == []
    assert scheduler.finished(2) == []
    assert scheduler.finished(3) == [Send(4, 1, (0,))], "the free slot beside it has no device left"
    assert scheduler.submit(6, need=Need(devices=0)) == [], "the older call may still go there"
    assert scheduler.finished(1) == [Send(5, 0), Send(6, 1, ())]


def test_a_call_goes_when_an_actor_makes_the_share_of_a_slot_smaller() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 4, Supply(cpus=8, memory_gib=16, devices=("A100",) * 4))
    for task, devices in enumerate([2 * UNIT, UNIT, 250]):
        assert len(scheduler.submit(task, need=Need(devices=devices))) == 1
    assert scheduler.submit(4, need=Need(devices=4 * UNIT)) == []
    assert scheduler.submit(5) == [], "its share is a whole device"
    assert scheduler.cancel(4) is None
    assert scheduler.submit_actor(6, nodes=None, need=Need(devices=250)) == [Settle(6, 0, (3,)), Send(5, 0, (3,))]
