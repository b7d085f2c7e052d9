"""Elastic pools of rented machines with a head: nodes come, go and are taken back, and so is the first one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

import skyward as sky
from skyward.errors import NoCapacity, Preempted
from skyward.events import Event, NodeReplaced, PoolScaled, PreemptionNotice, ScalingFailed
from tests.engines import without_ray
from tests.hosts.ec2 import Ec2
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

GONE_S = 60.0
"""Until machines that are told to end are gone, on a loaded machine."""

# Calls travel by value, because this module is not on the nodes.
where = sky.compute(lambda: os.uname().nodename)


@dataclass
class Rented:
    """A pool of one or two nodes, its cloud, and what it told. Each test leaves one node."""

    pool: sky.ComputePool
    ec2: Ec2
    events: list[Event] = field(default_factory=list)

    def running(self) -> list[str]:
        """Return the hosts of the machines that cost money."""
        return [machine.name for machine in self.ec2.machines("pending", "running")]

    def instance(self, name: str) -> str:
        """Return the instance that a host is."""
        (found,) = [machine.id for machine in self.ec2.machines("running") if machine.name == name]
        return found

    def shrink_to(self, name: str) -> None:
        """Let the pool give back all nodes except the one beside the head, which is on this host."""
        self.pool.scale(1)
        until(lambda: self.running() == [name], GONE_S)
        assert where() @ self.pool == [name]
        self.pool.scale(None)
        self.events.clear()


@pytest.fixture(scope="module")
def made(ec2_server: Ec2, package_index: PackageIndex, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rented]:
    events: list[Event] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in ec2_server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        pool = sky.ComputePool(
            sky.AWS(instance_types=["m5.large"], client_cidr=ec2_server.client_cidr, lease_s=60.0),
            nodes=(1, 2),
            allocation="spot",
            image=sky.Image(pip_index_url=package_index.simple),
            logs=False,
            console=False,
            on_event=events.append,
        )
        with without_ray(pool):
            yield Rented(pool, ec2_server, events)
        until(lambda: ec2_server.left() == [], GONE_S)
    ec2_server.reset()


@pytest.fixture
def rented(made: Rented) -> Rented:
    made.events.clear()
    return made


def test_a_node_comes_for_waiting_calls_and_its_bill_ends_when_it_goes(rented: Rented) -> None:
    pool = rented.pool
    (first,) = where() @ pool
    waiting = [sky.compute(time.sleep)(1.0) > pool for _ in range(100)]
    began = time.time()
    until(lambda: pool.nodes == 2)
    grown = next(event for event in rented.events if isinstance(event, PoolScaled))
    assert grown.at - began < 2.0
    for future in waiting:
        future.cancel()
    other = (where() @ pool)[1]
    assert sorted(rented.running()) == sorted([first, other])
    rented.shrink_to(first)


def test_a_pool_that_gets_no_further_machine_says_so_and_goes_on(rented: Rented) -> None:
    pool = rented.pool
    rented.ec2.has_no_capacity()
    with pytest.raises(NoCapacity, match=r"m5\.large"):
        pool.scale(2)
    rented.ec2.clear_faults()
    until(lambda: any(isinstance(event, ScalingFailed) for event in rented.events))  # a thread brings them
    (failed,) = [event for event in rented.events if isinstance(event, ScalingFailed)]
    assert (failed.nodes, failed.wanted) == (1, 2)
    assert where() @ pool == rented.running()


def test_calls_of_machines_that_are_taken_back_say_so_and_the_head_moves(rented: Rented) -> None:
    pool, go = rented.pool, "/tmp/go"

    @sky.compute
    def wait() -> str:
        while not os.path.exists(go):
            time.sleep(0.01)
        return os.uname().nodename

    def running_on(*nodes: int) -> list[sky.Future[str]]:
        futures = [wait() > pool.node(node) for node in nodes]
        until(lambda: all(future.running() for future in futures))
        return futures

    pool.scale(2)
    first, second = where() @ pool
    kept, lost = running_on(0, 1)
    rented.ec2.interrupt(rented.instance(second), in_s=0.5)
    with pytest.raises(Preempted):
        lost.result(60)
    third = where().with_options(retries=5) >> pool.node(1)
    assert third != second

    (other,) = running_on(1)
    waiting = where().with_options(retries=1) > pool.node(0)
    rented.ec2.interrupt(rented.instance(first), in_s=0.5)
    with pytest.raises(Preempted):
        kept.result(60)
    rented.ec2.host(rented.instance(third)).write(go, "")
    assert other.result(60) == third
    assert waiting.result(100) not in (first, second, third)
    assert (where() @ pool)[1] == third
    assert len(rented.running()) == 2
    rented.shrink_to(third)


def test_the_only_machine_is_relieved_with_the_head_after_a_notice(rented: Rented) -> None:
    @sky.compute
    def until_told() -> str:
        deadline, info = time.monotonic() + 60, sky.instance_info()
        while info is not None and not info.is_preempted and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)  # a callback that saves a state
        return os.uname().nodename if info is not None and info.is_preempted else "was not told"

    pool = rented.pool
    (name,) = rented.running()
    told = until_told() > pool
    until(told.running)
    rented.ec2.interrupt(rented.instance(name), in_s=120.0)
    assert told.result(60) == name, "the call went on, and knew it"
    assert "terminate" in next(event.notice for event in rented.events if isinstance(event, PreemptionNotice))
    until(lambda: any(isinstance(event, NodeReplaced) for event in rented.events), 60)
    until(lambda: name not in rented.running(), 60)
    assert where() @ pool == rented.running()
