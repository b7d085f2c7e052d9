"""Elastic pools on rented machines: they are billed while they are there, and none is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

import skyward as sky
from skyward.errors import NoCapacity
from skyward.events import Event, PoolScaled, ScalingFailed
from skyward.pool.fleet import survey
from skyward.state.journal import journals
from skyward.testing.fake_cloud import FakeCloud, FakeFaults, FakeProvider
from skyward.testing.virtual_clock import FastClock
from tests.waiting import until

LEASE_S = 9000.0
"""Half a minute by the clock below: a loaded machine renews it late, and no test waits for its end."""


class PerSecond(FakeCloud):
    """A cloud that bills by the second from the first on, so that no test waits for a minute to be over."""

    minimum_billed_s: ClassVar[float] = 0.0


@sky.compute
def place() -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    cloud = PerSecond(FastClock(300.0))
    yield cloud
    assert cloud.billed() == []
    assert cloud.networks == {}
    assert journals() == []


def test_nodes_are_rented_and_given_back_one_by_one(cloud: FakeCloud) -> None:
    events: list[Event] = []
    provider = FakeProvider(api=cloud, has_agents=True, lease_s=LEASE_S)
    with sky.ComputePool(
        provider, nodes=(1, 3), idle_timeout_s=60, logs=False, console=False, on_event=events.append
    ) as pool:
        pool.scale(3)
        assert len(cloud.billed()) == 3
        assert place() @ pool == [0, 1, 2]
        pool.scale(1)
        until(lambda: len(cloud.billed()) == 1)
        pool.scale(2)
        assert place() @ pool == [0, 1]
        assert len(cloud.servers) == 4
        assert 0 < pool.cost_usd < 1
    assert [(e.before, e.nodes) for e in events if isinstance(e, PoolScaled)] == [(1, 3), (3, 1), (1, 2)]


def test_a_resting_pool_costs_nothing_and_the_next_call_rents_again(cloud: FakeCloud) -> None:
    provider = FakeProvider(api=cloud, has_agents=True, lease_s=LEASE_S)
    with sky.ComputePool(provider, nodes=2, idle_timeout_s=0.3, logs=False, console=False) as pool:
        until(lambda: cloud.billed() == [])
        until(lambda: cloud.networks == {})
        (listed,) = survey(is_local_only=True).pools
        assert listed.is_resting
        assert place() @ pool == [0, 1]
        assert len(cloud.servers) == 4


def test_max_hourly_cost_and_lack_of_capacity_bound_the_growth(cloud: FakeCloud) -> None:
    events: list[Event] = []
    provider = FakeProvider(api=cloud, has_agents=True, lease_s=LEASE_S)
    with sky.ComputePool(
        provider,
        nodes=(1, 8),
        max_hourly_cost=0.13,
        allocation="on-demand",
        logs=False,
        console=False,
        on_event=events.append,
    ) as pool:
        with pytest.raises(NoCapacity):
            pool.scale(8)  # 3 of the smallest machines cost 0.12 USD per hour
        assert pool.nodes == 2  # 7, 3 and 1 more were tried
        assert len(cloud.billed()) == 2
        cloud.faults = FakeFaults(capacity={("small", "a", False): 2, ("small", "b", False): 0})
        with pytest.raises(NoCapacity, match="only 0 small"):
            pool.scale(3)
        assert place() @ pool == [0, 1]
    assert [event.nodes for event in events if isinstance(event, ScalingFailed)] == [2, 2]


def test_a_pool_that_ends_while_machines_boot_leaves_none(cloud: FakeCloud) -> None:
    provider = FakeProvider(api=cloud, has_agents=True, lease_s=LEASE_S)
    with sky.ComputePool(provider, nodes=(0, 2), logs=False, console=False) as pool:
        cloud.faults = FakeFaults(boot_s=3600.0)
        future = place() > pool
        until(cloud.billed)
        future.cancel()
