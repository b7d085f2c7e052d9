"""Decisions about the size of a pool: their bounds for any situation, and whole days of work in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.schedule.resources import UNIT, Need, Supply
from skyward.schedule.scaling import REFUSAL_S, Bounds, Demand, Situation, decide
from skyward.schedule.scheduler import Scheduler

SECONDS = st.one_of(st.just(0.0), st.floats(0, 1e5), st.just(math.inf))


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    most = draw(st.integers(1, 50))
    least = draw(st.integers(0, most))
    return Bounds(
        least=least,
        most=most,
        at_rest=draw(st.sampled_from((0, least))),
        start=draw(st.integers(least, most)),
        slots=draw(st.integers(1, 16)),
        idle_s=draw(st.floats(0.1, 1e4)),
        start_s=draw(st.floats(0, 600)),
        minimum_billed_s=draw(st.sampled_from((0.0, 60.0))),
        node_usd_per_hour=draw(st.sampled_from((0.0, 0.04, 3.0))),
        most_usd_per_hour=draw(st.sampled_from((math.inf, 1.0, 20.0))),
    )


situations = st.builds(
    Situation,
    nodes=st.integers(0, 60),
    waiting=st.integers(0, 1000),
    mean_s=st.one_of(st.none(), st.floats(0, 1e4)),
    peak=st.integers(0, 60),
    quiet_s=st.floats(0, 1e5),
    pressed_s=st.floats(0, 1e5),
    idle_s=SECONDS,
    youngest_s=SECONDS,
    refused_s=SECONDS,
    left_usd=st.one_of(st.just(math.inf), st.floats(-1, 100)),
)


@given(now=situations, limits=bounds())
def test_every_decision_stays_within_its_bounds(now: Situation, limits: Bounds) -> None:
    size = decide(now, limits)
    assert size.nodes >= 0
    assert size.nodes <= max(now.nodes, limits.most)
    if size.nodes > now.nodes:
        assert now.waiting
        assert size.nodes <= limits.most
        assert size.nodes <= now.nodes + math.ceil(now.waiting / limits.slots) or size.nodes <= max(
            1, limits.start, limits.least
        )
        assert size.why
    if now.nodes < size.nodes and now.nodes:  # the first node is the launch's affair, which raises
        assert now.refused_s >= REFUSAL_S
        assert size.nodes * limits.node_usd_per_hour <= limits.most_usd_per_hour + 1e-6
        until_paid_usd = size.nodes * limits.node_usd_per_hour * limits.pays_s / 3600
        assert not until_paid_usd or until_paid_usd <= now.left_usd + 1e-6
    if size.nodes < now.nodes <= limits.most:
        assert not now.waiting
        assert now.youngest_s >= limits.minimum_billed_s
        assert size.nodes >= (limits.at_rest if now.idle_s >= limits.idle_s else max(limits.least, now.peak))


@given(now=situations, limits=bounds())
def test_a_decision_that_was_carried_out_is_not_taken_back(now: Situation, limits: Bounds) -> None:
    size = decide(now, limits)
    again = decide(replace(now, nodes=size.nodes, youngest_s=0.0 if size.nodes > now.nodes else now.youngest_s), limits)
    if size.nodes > now.nodes:
        assert again.nodes >= size.nodes
    if size.nodes < now.nodes:
        assert again.nodes <= size.nodes or not size.nodes


@dataclass
class Simulation:
    """A pool in virtual time: calls with their durations arrive, nodes take `start_s` to come."""

    limits: Bounds
    budget_usd: float = math.inf
    now_s: float = 0.0
    nodes: list[float] = field(default_factory=list)
    """Start of each node."""
    coming: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    """End of each running call."""
    waiting: list[float] = field(default_factory=list)
    mean_s: float | None = None
    spent_usd: float = 0.0
    changes: list[tuple[float, int, int]] = field(default_factory=list)
    needs: list[tuple[float, int]] = field(default_factory=list)
    pressed_at: float | None = None
    ended_at: float = 0.0
    used_at: float = 0.0

    def run(self, arrivals: dict[int, list[float]], seconds: int) -> None:
        """Run for a time. `arrivals`: second -> durations of the calls that arrive."""
        for second in range(seconds):
            self.now_s += 1
            self.waiting += arrivals.get(second, [])
            self._work()
            if second % 5 == 0:
                self._look()
            self.spent_usd += len(self.nodes) * self.limits.node_usd_per_hour / 3600

    def _work(self) -> None:
        self.nodes += [self.now_s for at in self.coming if at <= self.now_s]
        self.coming = [at for at in self.coming if at > self.now_s]
        if any(end <= self.now_s for end in self.running):
            self.ended_at = self.now_s
        self.running = [end for end in self.running if end > self.now_s]
        slots = len(self.nodes) * self.limits.slots
        while self.waiting and len(self.running) < slots:
            duration = self.waiting.pop(0)
            self.mean_s = duration if self.mean_s is None else 0.8 * self.mean_s + 0.2 * duration
            self.running.append(self.now_s + duration)

    def _look(self) -> None:
        if self.waiting or self.running:
            self.used_at = self.now_s
        if not self.waiting:
            self.ended_at = self.now_s
        self.pressed_at = (self.pressed_at or self.now_s) if self.waiting else None
        needed = math.ceil((len(self.waiting) + len(self.running)) / self.limits.slots)
        self.needs = [n for n in self.needs if n[0] >= self.now_s - self.limits.idle_s] + [(self.now_s, needed)]
        there = len(self.nodes)
        size = decide(
            Situation(
                nodes=there,
                waiting=len(self.waiting),
                mean_s=self.mean_s,
                peak=max(n for _, n in self.needs),
                quiet_s=self.now_s - self.ended_at,
                pressed_s=0.0 if self.pressed_at is None else self.now_s - self.pressed_at,
                idle_s=self.now_s - self.used_at,
                youngest_s=self.now_s - max(self.nodes, default=-math.inf),
                left_usd=self.budget_usd - self.spent_usd,
            ),
            self.limits,
        )
        if self.coming or size.nodes == there:  # as the pool: one launch at a time
            return
        self.changes.append((self.now_s, there, size.nodes))
        if size.nodes > there:
            self.coming = [self.now_s + self.limits.start_s] * (size.nodes - there)
        else:
            idle = there - math.ceil(len(self.running) / self.limits.slots)
            del self.nodes[: min(there - size.nodes, idle)]


CLOUD = Bounds(
    least=1,
    most=8,
    at_rest=1,
    start=1,
    slots=2,
    idle_s=300.0,
    start_s=60.0,
    minimum_billed_s=60.0,
    node_usd_per_hour=3.6,
)


def test_a_backlog_of_long_calls_grows_the_pool_and_the_idle_pool_shrinks_once() -> None:
    simulation = Simulation(CLOUD, nodes=[0.0])
    simulation.run({0: [600.0] * 32}, 3600)
    assert not simulation.waiting
    assert max(size for _, _, size in simulation.changes) == 8
    directions = [size > before for _, before, size in simulation.changes]
    assert directions == sorted(directions, reverse=True)  # it grows, then shrinks, and never the other way round
    assert len(simulation.nodes) == 1
    assert simulation.now_s > 0


def test_short_bursts_do_not_grow_a_pool_whose_nodes_take_a_minute() -> None:
    simulation = Simulation(CLOUD, nodes=[0.0])
    simulation.run({second: [0.5] * 20 for second in range(0, 3600, 120)}, 3600)
    assert simulation.changes == []


def test_a_steady_load_finds_its_size_and_keeps_it() -> None:
    simulation = Simulation(CLOUD, nodes=[0.0])
    simulation.run({second: [30.0] for second in range(0, 4 * 3600, 4)}, 4 * 3600)  # 7.5 slots are busy on average
    settled = [change for change in simulation.changes if change[0] > 3600]
    assert settled == []
    assert len(simulation.nodes) >= 4


def test_a_slow_trickle_lets_the_pool_shrink_though_each_node_gets_calls() -> None:
    simulation = Simulation(CLOUD, nodes=[0.0] * 8)
    simulation.run({second: [5.0] for second in range(0, 1800, 10)}, 1800)
    assert len(simulation.nodes) == 1


@given(budget_usd=st.floats(0.2, 5.0), calls=st.integers(1, 200), duration_s=st.floats(1, 900))
def test_growth_never_takes_a_pool_beyond_its_budget_before_it_pays(
    budget_usd: float, calls: int, duration_s: float
) -> None:
    simulation = Simulation(CLOUD, nodes=[0.0], budget_usd=budget_usd)
    simulation.run({0: [duration_s] * calls}, 300)
    price_s = CLOUD.node_usd_per_hour / 3600
    one_node_usd = 300 * price_s
    assert simulation.spent_usd <= max(one_node_usd, budget_usd + 8 * price_s * 300)
    for at, before, size in simulation.changes:
        if size > before:
            assert size * price_s * CLOUD.pays_s <= budget_usd + 1e-6, at


def test_a_pool_without_nodes_begins_at_once_and_whole_if_it_is_fixed() -> None:
    fixed = Bounds(least=4, most=4, at_rest=0, start=4, idle_s=600.0)
    assert decide(Situation(nodes=0), fixed).nodes == 0
    assert decide(Situation(nodes=0, waiting=1, left_usd=0.0), fixed).nodes == 4
    assert decide(Situation(nodes=4, idle_s=600.0), fixed).nodes == 0
    assert decide(replace(Situation(nodes=0), waiting=9), replace(fixed, least=0, start=0, most=3)).nodes == 1


def test_a_refusal_is_remembered_for_a_while() -> None:
    now = Situation(nodes=1, waiting=9, mean_s=600.0, refused_s=5.0)
    assert decide(now, CLOUD).nodes == 1
    assert decide(replace(now, refused_s=REFUSAL_S), CLOUD).nodes > 1


def test_money_bounds_growth_and_the_decision_says_so() -> None:
    now = Situation(nodes=2, waiting=9, mean_s=600.0)
    by_hour = decide(now, replace(CLOUD, most_usd_per_hour=3 * 3.6))
    assert (by_hour.nodes, by_hour.is_bound) == (3, False)
    spent = decide(replace(now, left_usd=0.01), CLOUD)
    assert (spent.nodes, spent.is_bound) == (2, True)


def test_demand_counts_gangs_by_nodes_and_names_the_nodes_that_calls_wait_for() -> None:
    scheduler = Scheduler()
    for node in range(3):
        scheduler.node_up(node, 4)
    for node in (3, 4):
        scheduler.node_absent(node, 4)
    scheduler.submit_gang(1, nodes=(0, 1), places=1)
    for task in range(2, 8):
        scheduler.submit(task)
    scheduler.submit(20, nodes=(4,))
    demand = scheduler.demand({3, 4})
    assert demand == Demand(loads=demand.loads, used=frozenset({0, 1}), named=frozenset({4}), known=frozenset(range(5)))
    assert demand.busy == 8
    assert demand.needed(slots=4) == 2 + 1 + math.ceil(demand.loads[2] / 4)
    assert scheduler.is_wanted(4)
    assert not scheduler.is_wanted(3)
    for task in range(30, 60):
        scheduler.submit(task, in_advance=False)
    assert scheduler.demand({3, 4}).waiting == 30 - (12 - 8)
    assert scheduler.node_up(4, 4)  # the call that waited for it goes there


@pytest.mark.parametrize("slots", [1, 4])
def test_a_node_that_rests_takes_no_call_and_loses_none(slots: int) -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, slots)
    assert scheduler.node_lost(0, will_return=True) == []
    assert scheduler.submit(1) == []
    assert scheduler.demand({0}).waiting == 1
    assert scheduler.node_up(0, slots)


def test_demand_counts_a_call_with_numbers_as_the_slots_that_it_leaves_empty() -> None:
    scheduler = Scheduler()
    scheduler.node_absent(1, 4)
    scheduler.node_up(0, 4, Supply(cpus=6, memory_gib=64, devices=("A100", "A100")))
    for call in range(4):
        scheduler.submit(call, need=Need(devices=2 * UNIT))
    demand = scheduler.demand({1})
    assert demand.loads == {0: 4}, "one call has both devices"
    assert (demand.waiting, demand.needed(4)) == (12, 4)
    scheduler.submit_gang(9, nodes=None, places=1, count=1, need=Need(cpus=2 * UNIT))
    assert scheduler.demand({1}).waiting == 14, "three of those fill the four slots of a node"
    scheduler.finished(0)
    assert [scheduler.demand({1}).waiting, scheduler.demand({1}).loads[0]] == [10, 4]
