"""Nodes of a pool on Ray are cut off for longer than their lease: from everybody, from the program, from the head."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NodeLost, RefLost
from tests.hosts.bed import Bed
from tests.hosts.chaos import hidden
from tests.hosts.faults import EPSILON_S, Ledger, Place, gang_of, noted, nothing_runs_on
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_S = 15.0
RAY_S = 120.0
"""Longest wait for Ray on a busy machine. It stands within 20 s on a free one."""

NewLedger = Callable[[Place], Ledger]

# Calls travel by value, because this module is not on the nodes.
where = sky.compute(lambda: os.uname().nodename)


@dataclass(frozen=True, kw_only=True)
class OnRay:
    pool: sky.ComputePool
    place: Place
    events: list[sky.events.Event]

    @property
    def lost(self) -> set[int]:
        """Nodes that were lost so far."""
        return {event.node for event in self.events if isinstance(event, sky.events.NodeLost)}


@pytest.fixture(scope="module")
def on_ray(bed: Bed, hosts: Callable[[int], list[Host]], ray_index: PackageIndex) -> Iterator[OnRay]:
    place, events = Place(bed=bed, index=ray_index, hosts=hosts(3)), list[sky.events.Event]()
    options: dict[str, Any] = {"image": place.image, "nodes": 3, "concurrency": 2, "logs": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyward.providers.ssh._CONNECT_S", 2.0)  # no option: only tests wait for nobody
        with sky.ComputePool(place.ssh(LEASE_S), engine="ray", on_event=events.append, **options) as pool:
            until(lambda: pool.engine == "ray", within_s=RAY_S)
            yield OnRay(pool=pool, place=place, events=events)
            pool.close(cancel=True)  # calls of a failed test wait for a file that nobody makes
    nothing_runs_on(place.hosts)


def test_a_node_is_not_lost_as_long_as_the_head_or_the_program_reaches_it(on_ray: OnRay, ledger_of: NewLedger) -> None:
    pool, (first, one, other) = on_ray.pool, on_ray.place.hosts
    ledger = ledger_of(on_ray.place)
    agents = pool.agent_pids()
    futures = {n: ledger.submit(noted(ledger.path, 0.2)(n) > pool, n) for n in range(400)}
    until(lambda: len(ledger.ran()) > 12)
    with hidden(one, first), hidden(other, on_ray.place.bed):
        time.sleep(LEASE_S + 2.0)
        assert where() @ pool == [host.name for host in on_ray.place.hosts]
        assert pool.engine == "direct", "the program lends a channel to the one that the head cannot reach"
        assert {event.node for event in on_ray.events if isinstance(event, sky.events.LinkLost)} <= {1}
    assert ledger.settle(futures) == {}
    assert set(ledger.ran().values()) == {1}
    assert pool.agent_pids() == agents
    assert not on_ray.lost
    until(lambda: pool.engine == "ray", within_s=RAY_S)


def test_a_node_that_nobody_reaches_ends_by_its_lease_and_takes_only_its_calls(
    on_ray: OnRay, ledger_of: NewLedger
) -> None:
    def wait(path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.01)
        return os.uname().nodename

    pool, (_, lost, other) = on_ray.pool, on_ray.place.hosts
    ledger, again, path = ledger_of(on_ray.place), ledger_of(on_ray.place), f"/root/go-{time.monotonic_ns()}"
    kept = sky.compute(bytes)(2_000_000).keep() >> pool.node(1)
    stays = sky.compute(wait)(path) > pool.node(2)
    gang = gang_of(wait).with_options(nodes=3, max_restarts=1)(path) > pool
    doubtful = sky.compute(time.sleep)(600) > pool.node(1)
    until(lambda: all(future.running() for future in (stays, gang, doubtful)))
    futures = {n: ledger.submit(noted(ledger.path, 0.1)(n) > pool, n) for n in range(200)}
    repeated = {n: again.submit(noted(again.path, 0.1).with_options(retries=2)(n) > pool, n) for n in range(200)}
    until(lambda: len(ledger.ran()) > 12)
    with lost.link_cut():
        began = time.monotonic()
        nothing_runs_on([lost], LEASE_S + EPSILON_S)
        with pytest.raises(NodeLost, match="node 1") as caught:
            doubtful.result(LEASE_S + EPSILON_S)
        assert caught.value.started is None
        assert time.monotonic() - began > LEASE_S - 1.0, "it was waited for as long as it might live"
        losses = ledger.settle(futures)
        assert {error.started for error in losses.values()} <= {None}
        assert len(losses) < 40, "no more than what had been sent"
        assert again.settle(repeated) == {}
        with pytest.raises(RefLost):
            kept.get()
        other.write(path, "")
        assert stays.result(60) == other.name
        assert on_ray.lost == {1}
    assert max(ledger.ran().values()) == 1
    # Its successor is the same host, as soon as that can be reached.
    names = [host.name for host in on_ray.place.hosts]
    for host in on_ray.place.hosts:
        host.write(path, "")
    assert gang.result(60) == names, "it goes on with the replacement"
    assert where() @ pool == names
    until(lambda: pool.engine == "ray", within_s=RAY_S)
