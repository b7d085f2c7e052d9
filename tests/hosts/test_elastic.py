"""Elastic pools on hosts with a head: nodes come, join Ray, and go with nothing left, and the only one is replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NodeLost as NodeLostError
from skyward.events import Event, NodeLost, PoolScaled
from tests.engines import hosted_pool
from tests.hosts.bed import Bed
from tests.hosts.faults import Place, nested_call_s, nothing_runs_on, pids, ray_processes
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 120.0
"""Longest wait for Ray on a busy machine."""

# Calls travel by value, because this module is not on the nodes.
where = sky.compute(lambda: os.uname().nodename)


def test_nodes_come_for_waiting_calls_join_ray_and_go_when_their_values_have_moved_the_first_one_too(
    bed: Bed, hosts: Callable[[int], list[Host]], ray_index: PackageIndex
) -> None:
    place = Place(bed=bed, index=ray_index, hosts=hosts(3))
    names, events = [host.name for host in place.hosts], list[Event]()
    options: dict[str, Any] = {"image": place.image, "nodes": (0, 3), "logs": False, "console": False}
    with sky.ComputePool(place.ssh(), engine="ray", on_event=events.append, **options) as pool:
        asked_at = time.time()
        assert (where() @ pool, pool.engine) == (names[:1], "direct")
        start_s = time.time() - asked_at
        futures = [sky.compute(time.sleep)(0.3) > pool for _ in range(100)]
        began = time.time()
        until(lambda: pool.nodes == 3)
        grown = next(event for event in events if isinstance(event, PoolScaled) and event.before == 1)
        assert grown.at - began < 2.0 + start_s, "at the latest when calls have waited as long as a node takes to come"
        assert [future.result(LIMIT_S) for future in futures] == [None] * 100
        until(lambda: pool.engine == "ray", within_s=LIMIT_S)
        assert where() @ pool == names
        assert nested_call_s(pool, on=1, to=2) < 1.0
        kept: Any = sky.compute(bytes)(20_000_000).keep() >> pool.node(2)
        (target,) = pids(place.hosts[0], "agent")
        os.kill(target.outside_pid, signal.SIGSTOP)  # the value cannot have moved until this one goes on
        pool.scale(1)
        until(lambda: list(pool.agent_pids()) == [0, 2])
        time.sleep(1.0)
        assert list(pool.agent_pids()) == [0, 2], "it is given back only when its value has moved"
        os.kill(target.outside_pid, signal.SIGCONT)
        until(lambda: list(pool.agent_pids()) == [0])
        nothing_runs_on(place.hosts[1:], 10.0)
        assert ray_processes(place.hosts[0])
        assert len(kept.get()) == 20_000_000
        kept.drop()
        pool.counter("rests").increment()
        pool.scale(0)
        until(lambda: pool.nodes == 0)
        nothing_runs_on(place.hosts, 10.0)
        assert (pool.engine, pool.counter("rests").value()) == ("direct", 1)
        pool.scale(2)
        until(lambda: pool.engine == "ray", within_s=LIMIT_S)
        assert (where() @ pool, pool.counter("rests").value()) == (names[:2], 1)
        assert not [event for event in events if isinstance(event, NodeLost)]
    nothing_runs_on(place.hosts, 5.0)


def test_the_only_node_is_replaced_when_its_host_loses_its_power_with_the_head(
    place: Callable[[int], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.providers.ssh._CONNECT_S", 2.0)  # no option: only tests wait for nobody
    here = place(2)
    first, second = here.hosts
    with hosted_pool(here.ssh(6.0), image=here.image, nodes=(1, 2), logs=False, console=False) as pool:
        running = sky.compute(time.sleep)(600) > pool
        again = where.with_options(retries=1)() > pool
        until(running.running)
        first.power_loss()
        with pytest.raises(NodeLostError):
            running.result(LIMIT_S)
        assert again.result(LIMIT_S) == second.name
        first.start().wait_ssh()
        pool.scale(2)
        assert sorted(where() @ pool) == sorted([first.name, second.name])
    nothing_runs_on(here.hosts, 10.0)
