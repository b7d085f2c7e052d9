"""The cost of a pool is counted, forecast and limited."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

import skyward as sky
from skyward.errors import BudgetExceeded, UsageError
from skyward.events import (
    BudgetWarning,
    CostUpdated,
    Event,
    InstanceLaunched,
    InstanceTerminated,
    ScalingFailed,
    ignore,
)
from skyward.pool.cost import Spending, affordable
from skyward.pool.machines import PoolMachines
from skyward.state.journal import journals
from skyward.testing import Faults
from skyward.testing.fake_cloud import FakeCloud, FakeFaults, FakeProvider
from skyward.testing.virtual_clock import FastClock
from skyward.values.machine import Offer, PoolSpec
from tests.engines import without_ray
from tests.waiting import until


class Now:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def launched(instance: str, price: float) -> InstanceLaunched:
    return InstanceLaunched(node=0, instance=instance, instance_type="t", price_usd_per_hour=price, is_spot=False)


def gone(instance: str) -> InstanceTerminated:
    return InstanceTerminated(node=0, instance=instance)


def spending(now: Now, *, budget_usd: float | None = None, told: list[Event] | None = None) -> Spending:
    return Spending(
        minimum_s=60.0,
        ending_s=30.0,
        budget_usd=budget_usd,
        tell=(told if told is not None else []).append,
        stop=lambda error: None,
        clock=now,
        wall_clock=now,
    )


class TestSpending:
    def test_another_process_goes_on_counting_and_knows_how_long_the_budget_lasts(self) -> None:
        now = Now()
        first = spending(now, budget_usd=10.0)
        first.take(launched("a", 3.6))
        first.take(launched("b", 3.6))
        now.seconds = 1000.0
        first.take(gone("b"))
        facts = json.loads(json.dumps(first.facts()))
        first.leave()
        now.seconds = 2000.0
        assert first.spent_usd == pytest.approx(2.0)
        second = spending(now, budget_usd=10.0)
        second.resume(facts)
        assert second.spent_usd == pytest.approx(3.0)
        assert second.lasts_s(100.0) == pytest.approx(6900.0)
        second.leave()
        assert spending(now).lasts_s(0.0) is None

    def test_a_machine_that_no_record_has_costs_nothing_more(self) -> None:
        now = Now()
        first = spending(now)
        first.take(launched("a", 3.6))
        first.take(launched("b", 7.2))
        second = spending(now)
        second.resume(first.facts())
        now.seconds = 1000.0
        second.keep_only({"a"})  # the first program died before the launch of "b" was over
        assert second.spent_usd == pytest.approx(3.0)
        assert second.price_usd_per_hour == pytest.approx(3.6)

    @pytest.mark.parametrize(("version", "charged_s"), [("this", 500.0 + 600.0 + 30.0), ("an older", 72000.0)])
    def test_a_machine_that_was_launching_is_charged_for_as_long_as_it_may_have_lived(
        self, version: str, charged_s: float
    ) -> None:
        now = Now()
        first = spending(now)
        first.take(launched("a", 3600.0))
        now.seconds = 500.0
        facts = json.loads(json.dumps(first.facts()))
        if version == "an older":
            del facts["at"]
        now.seconds = 72000.0
        second = spending(now)
        second.resume(facts)
        second.keep_only((), most_s=600.0)
        assert second.spent_usd == pytest.approx(charged_s)

    def test_cost_counts_by_the_second_from_launch_to_termination(self) -> None:
        now = Now()
        account = spending(now)
        account.take(launched("a", 3.6))
        now.seconds = 1000.0
        account.take(launched("b", 7.2))
        assert account.price_usd_per_hour == pytest.approx(10.8)
        now.seconds = 2000.0
        account.take(gone("a"))
        now.seconds = 9000.0
        account.take(gone("b"))
        assert account.spent_usd == pytest.approx(2.0 + 16.0)
        assert account.price_usd_per_hour == 0

    def test_each_machine_costs_the_providers_minimum(self) -> None:
        now = Now()
        account = spending(now)
        account.take(launched("a", 3.6))
        assert account.spent_usd == pytest.approx(0.06)
        now.seconds = 1.0
        account.take(gone("a"))
        account.take(gone("a"))
        assert account.spent_usd == pytest.approx(0.06)

    def test_the_remaining_budget_leaves_room_for_the_end(self) -> None:
        now = Now()
        account = spending(now, budget_usd=1.0)
        now.seconds = 5.0
        account.take(launched("a", 3.6))
        now.seconds = 505.0
        assert account.left_usd == pytest.approx(1.0 - 0.5 - 0.03)

    def test_each_change_is_reported(self) -> None:
        told: list[Event] = []
        account = spending(Now(), told=told)
        account.take(launched("a", 3.6))
        account.take(gone("a"))
        assert told == [
            CostUpdated(price_usd_per_hour=3.6, spent_usd=0.06),
            CostUpdated(price_usd_per_hour=0, spent_usd=0.06),
        ]


def test_offers_beyond_the_budget_are_left_out() -> None:
    cheap, dear = (
        Offer(provider="p", instance_type=name, vcpus=1, memory_gib=1.0, price_usd_per_hour=price)
        for name, price in (("cheap", 1.0), ("dear", 100.0))
    )
    assert affordable([cheap, dear], nodes=2, minimum_s=60, budget_usd=None) == [cheap, dear]
    assert affordable([cheap, dear], nodes=2, minimum_s=60, budget_usd=1.0) == [cheap]
    with pytest.raises(BudgetExceeded, match=r"2 x cheap at 1 USD/h cost 0.03333 USD.*nothing was launched") as caught:
        affordable([cheap, dear], nodes=2, minimum_s=60, budget_usd=0.03)
    assert caught.value.cost_usd == pytest.approx(2 * 60 / 3600)


# Whole pools ---------------------------------------------------------------------------------------------------------


class CloudByTheSecond(FakeCloud):
    minimum_billed_s: ClassVar[float] = 1.0


class CloudByTheHour(FakeCloud):
    minimum_billed_s: ClassVar[float] = 3600.0


def offer(price: float) -> Offer:
    return Offer(provider="fake", instance_type="dear", vcpus=2, memory_gib=4.0, price_usd_per_hour=price)


class CloudWithAPrice(CloudByTheSecond):
    price = 3600.0

    def offers(self, spec: PoolSpec) -> list[Offer]:
        return [replace(offer, price_usd_per_hour=self.price) for offer in super().offers(spec)]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    """Cloud whose machines cost 1 USD a second."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    faults = FakeFaults(boot_s=2.0, ready_s=1.0, ending_s=1.0)
    cloud = CloudByTheSecond(FastClock(), faults=faults, catalogue=[offer(3600.0)])
    yield cloud
    assert cloud.billed() == []
    assert journals() == []
    assert all(server.terminate_calls <= 1 for server in cloud.servers.values())


def pool_on(cloud: FakeCloud, **options: object) -> sky.ComputePool:
    provider = FakeProvider(api=cloud, has_agents=True)
    return sky.ComputePool(provider, logs=False, allocation="on-demand", cancel_grace_s=0.2, **options)  # type: ignore[arg-type]


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


class TestPool:
    def test_a_rented_pool_counts_its_cost(self, cloud: FakeCloud) -> None:
        pool = pool_on(cloud, nodes=2)
        assert pool.cost_usd == 0
        assert pool.forecast().price_usd_per_hour == 7200
        assert pool.forecast().after(10) == pytest.approx(20)
        assert [call.operation for call in pool.plan()] == ["Prepare", "Create"]
        assert pool.offers()[0].price_usd_per_hour == 3600
        assert cloud.servers == {}
        events = pool.events()
        with pool:
            assert sky.compute(abs)(-1) @ pool == [1, 1]
            assert pool.cost_usd > 0
        cost = pool.cost_usd
        assert cost == pool.cost_usd
        told = [event for event in events if isinstance(event, CostUpdated)]
        assert [event.price_usd_per_hour for event in told] == [3600, 7200, 3600, 0]
        assert told[-1].spent_usd == pytest.approx(cost)

    def test_a_pool_beyond_its_budget_is_not_launched(self, cloud: FakeCloud) -> None:
        pool = pool_on(cloud, nodes=2, budget_usd=1.5)
        with pytest.raises(BudgetExceeded, match="nothing was launched"):
            pool.forecast()
        with pytest.raises(BudgetExceeded, match="nothing was launched"), pool:
            pass
        assert cloud.servers == {}

    def test_a_pool_is_closed_before_its_budget_is_spent_and_open_calls_say_why(self, cloud: FakeCloud) -> None:
        # The money lasts for a minute, and all but four seconds of it are kept for the end.
        faults = FakeFaults(boot_s=2.0, ready_s=1.0, ending_s=56.0)
        cheaper = CloudByTheSecond(FastClock(), faults=faults, catalogue=[offer(60.0)])
        pool = pool_on(cheaper, budget_usd=1.0)
        events = pool.events()
        with pytest.raises(BudgetExceeded, match="budget_usd=1"), pool:
            sky.compute(nap)(60) >> pool
        assert cheaper.billed() == []
        assert 0.05 < pool.cost_usd < 1.0
        (warning,) = [event for event in events if isinstance(event, BudgetWarning)]
        assert warning.budget_usd == 1.0
        with pytest.raises(BudgetExceeded):
            sky.compute(abs)(-1) >> pool

    def test_calls_after_the_budget_is_spent_raise_the_same_error(self, cloud: FakeCloud) -> None:
        with pool_on(cloud, budget_usd=12.0) as pool:  # it lasts longer than a start on a busy machine
            until(lambda: not pool.is_active)
            with pytest.raises(BudgetExceeded):
                sky.compute(abs)(-1) >> pool

    def test_a_budget_spent_while_the_pool_starts_ends_the_start(self, cloud: FakeCloud) -> None:
        cloud.faults = FakeFaults(boot_s=5000.0, ending_s=1.0)
        with pytest.raises(BudgetExceeded), pool_on(cloud, budget_usd=3.0):
            pass
        assert cloud.billed() == []

    def test_a_start_that_is_ended_costs_nothing_more(self, cloud: FakeCloud) -> None:
        cloud.faults = FakeFaults(boot_s=5000.0, ending_s=1.0)
        pool = pool_on(cloud, budget_usd=1000.0)
        before = set(threading.enumerate())
        with ThreadPoolExecutor() as threads:
            start = threads.submit(pool.start)
            until(cloud.billed)
            pool.close(cancel=True)
            assert start.exception(60) is not None
        cost = pool.cost_usd
        assert cost > 0
        assert cost == pool.cost_usd
        others = set(threading.enumerate()) - before
        until(lambda: not any(thread.name == "skyward-budget" and thread.is_alive() for thread in others))

    def test_a_lost_machine_is_replaced_once_and_counted(self, cloud: FakeCloud) -> None:
        with pool_on(cloud, nodes=2, max_hourly_cost=7200.0) as pool:
            cloud.reclaim(min(cloud.servers))
            Faults(pool).kill_node(0)
            until(lambda: len(pool.agent_pids()) == 2 and len(cloud.servers) == 3)
            assert sky.compute(abs)(-1) @ pool == [1, 1]
            assert len(cloud.billed()) == 2

    def test_an_elastic_pool_with_a_head_grows_and_shrinks_within_its_money(self, cloud: FakeCloud) -> None:
        events: list[Event] = []
        pool = pool_on(cloud, nodes=(1, 3), max_hourly_cost=7200.0, on_event=events.append)
        with without_ray(pool):
            calls = [sky.compute(nap)(30) > pool for _ in range(9)]
            until(lambda: any(isinstance(event, ScalingFailed) for event in events))
            assert pool.nodes == len(cloud.billed()) == 2
            for call in calls:
                call.cancel()
            pool.scale(1)
            until(lambda: len(cloud.billed()) == 1)
            assert sky.compute(abs)(-1) @ pool == [1]

    @pytest.mark.parametrize(("lasts_s", "prices"), [(300.0, [3600] * 3), (0.0, [3600, 7200, 10800])])
    def test_later_nodes_cost_what_was_listed_some_minutes_ago_at_most(
        self, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, lasts_s: float, prices: list[float]
    ) -> None:
        # private: no option, and a test waits for no minutes
        monkeypatch.setattr("skyward.pool.machines._OFFERS_LAST_S", lasts_s)
        events: list[Event] = []
        rising = CloudWithAPrice(FastClock(), faults=cloud.faults, catalogue=[offer(0.0)])
        with pool_on(rising, nodes=(1, 3), max_hourly_cost=sum(prices), on_event=events.append) as pool:
            for nodes in (2, 3):
                rising.price = 3600.0 * nodes
                pool.scale(nodes)
        assert [event.price_usd_per_hour for event in events if isinstance(event, InstanceLaunched)] == prices
        assert rising.billed() == []

    def test_a_pool_with_a_head_gets_no_node_beyond_its_budget_and_goes_on(self, cloud: FakeCloud) -> None:
        cheaper = CloudByTheHour(FastClock(), faults=cloud.faults, catalogue=[offer(1.0)])
        with without_ray(pool_on(cheaper, nodes=(1, 2), budget_usd=1.5)) as pool:
            with pytest.raises(BudgetExceeded, match="nothing was launched"):
                pool.scale(2)
            assert sky.compute(abs)(-1) @ pool == [1]
            assert len(cheaper.servers) == 1
        assert cheaper.billed() == []

    @pytest.mark.parametrize("budget", [0, -1.0, "much", float("nan")])
    def test_a_budget_is_a_number_above_zero(self, cloud: FakeCloud, budget: object) -> None:
        with pytest.raises(UsageError, match="budget_usd"):
            pool_on(cloud, budget_usd=budget)


def test_a_pool_that_is_adopted_is_not_charged_for_a_machine_of_a_program_that_died_a_day_ago(cloud: FakeCloud) -> None:
    spec = PoolSpec(provision_timeout_s=300.0, image=sky.Image(bootstrap_timeout_s=600.0))
    machines = PoolMachines(
        FakeProvider(api=cloud),
        spec,
        "adopted",
        budget_usd=None,
        emit=ignore,
        on_changed=lambda machines: None,
        on_overspent=lambda error: None,
    )
    began = time.time() - 86400.0
    machines.adopt(lambda emit: [], {"ended_usd": 1.0, "running": {"a": (began, 3600.0)}, "at": began + 9.0}, ())
    # what it cost before, until the record, for a launch, and for an end
    assert machines.cost_usd == pytest.approx(1.0 + 9.0 + 300.0 + 600.0 + 1.0 + spec.cancel_grace_s)


def test_a_pool_that_rents_nothing_costs_nothing() -> None:
    pool = sky.ComputePool(sky.Local(), budget_usd=0.01)
    assert pool.forecast().price_usd_per_hour == 0
    assert pool.forecast().lasts_s is None
    assert pool.cost_usd == 0
