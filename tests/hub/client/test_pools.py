"""Pools of a program with a hub record themselves there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skyward as sky
from skyward import hub
from skyward.testing import Faults
from skyward.testing.fake_cloud import FakeCloud, FakeFaults, FakeProvider
from skyward.testing.hub import HubServer
from skyward.testing.virtual_clock import FastClock
from skyward.values.machine import Offer
from tests.waiting import until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as made:
        hub.connect(made.url, made.token)
        yield made


def get(server: HubServer, path: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}{path}", headers=server.headers)) as answer:
        return json.load(answer)


def nap(gate: Path | None = None) -> None:
    """Take a moment, or all the time until a file is there."""
    time.sleep(0.1)
    if gate is not None:
        until(gate.exists, 100)


def test_a_pool_is_recorded_with_nodes_calls_and_end(server: HubServer, tmp_path: Path) -> None:
    with sky.ComputePool(sky.Local(), nodes=2, logs=False) as pool:
        sky.compute(nap)() @ pool
        with pytest.raises(ZeroDivisionError):
            sky.compute(divmod)(1, 0) >> pool
        running = sky.compute(nap)(tmp_path / "gate") > pool
        until(lambda: [call for call in only(server)["calls"] if call["ended_at"] is None])
        assert only(server)["pool"]["state"] == "open"
        (tmp_path / "gate").touch()
        running.result(60)
    until(lambda: only(server)["pool"]["state"] == "closed")
    history = only(server)
    assert (history["pool"]["nodes"], history["pool"]["calls"], history["pool"]["failed"]) == (2, 4, 1)
    assert [node["state"] for node in history["nodes"]] == ["ended", "ended"]
    assert sorted((call["name"], call["ok"]) for call in history["calls"]) == [
        *(("divmod", False), ("nap", True), ("nap", True), ("nap", True))
    ]
    assert all(call["ended_at"] >= call["started_at"] for call in history["calls"])
    assert {"node.ready", "pool.ready", "pool.closed"} <= {event["kind"] for event in history["events"]}


def test_a_lost_node_and_its_replacement_are_recorded(server: HubServer) -> None:
    with sky.ComputePool(sky.Local(), nodes=1, logs=False) as pool:
        from tests.engines import engine_of

        os.kill(engine_of(pool).nodes.agent_pids()[0], signal.SIGKILL)
        until(lambda: only(server)["pool"]["replaced_nodes"] == 1, within_s=60)
    assert only(server)["nodes"][0]["losses"] == 1


class CloudByTheSecond(FakeCloud):
    minimum_billed_s: ClassVar[float] = 1.0


def test_a_rented_pool_is_recorded_with_its_bill_and_its_lost_machine(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    offer = Offer(provider="fake", instance_type="dear", vcpus=2, memory_gib=4.0, price_usd_per_hour=3600.0)
    cloud = CloudByTheSecond(FastClock(), faults=FakeFaults(boot_s=2.0, ready_s=1.0, ending_s=1.0), catalogue=[offer])
    provider = FakeProvider(api=cloud, has_agents=True)
    with sky.ComputePool(
        provider, nodes=2, allocation="on-demand", max_hourly_cost=7200.0, cancel_grace_s=0.2, logs=False
    ) as pool:
        assert sky.compute(abs)(-1) @ pool == [1, 1]
        until(lambda: only(server)["pool"]["price_usd_per_hour"] == 7200)
        before = only(server)["pool"]["spent_usd"]
        until(lambda: only(server)["pool"]["spent_usd"] > before)  # the hub counts on between the pool's records
        lost = min(cloud.servers)
        cloud.reclaim(lost)
        Faults(pool).kill_node(0)
        until(lambda: only(server)["pool"]["replaced_nodes"] == 1, within_s=60)
        assert only(server)["pool"]["lost_nodes"] == 1
    until(lambda: only(server)["pool"]["state"] == "closed")
    history = only(server)
    assert history["pool"]["spent_usd"] == pytest.approx(pool.cost_usd)
    assert history["pool"]["price_usd_per_hour"] == 0
    machines = {machine["instance"]: machine for machine in history["machines"]}
    assert set(machines) == set(cloud.servers)
    assert len(machines) == 3
    assert {(m["instance_type"], m["price_usd_per_hour"], m["is_spot"]) for m in machines.values()} == {
        ("dear", 3600.0, False)
    }
    assert all(m["ended_at"] >= m["launched_at"] for m in machines.values())
    assert machines[lost]["node"] == 0
    assert [node["losses"] for node in history["nodes"]] == [1, 0]


PROGRAM = """
import os, sys
import skyward as sky
assert "skyward.hub" not in sys.modules
with sky.ComputePool(sky.Local(), logs=False) as pool:
    assert sky.compute(abs)(-1) >> pool == 1
print("skyward.hub" in sys.modules)
"""


@pytest.mark.parametrize("has_hub", [True, False])
def test_a_program_that_never_imports_the_hub_records_its_pools_if_its_environment_names_one(
    server: HubServer, has_hub: bool
) -> None:
    named = {"SKYWARD_HUB_URL": server.url, "SKYWARD_HUB_TOKEN": server.token} if has_hub else {}
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **named},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert (program.returncode, program.stdout, program.stderr) == (0, f"{has_hub}\n", "")
    states = [pool["state"] for pool in get(server, "/v1/pools")["pools"]]
    assert states == (["closed"] if has_hub else [])


def test_without_a_hub_nothing_is_recorded(spool: Path) -> None:
    with sky.ComputePool(sky.Local(), logs=False) as pool:
        assert sky.compute(abs)(-1) >> pool == 1
    assert not (spool.parent / "pools").exists()


def only(server: HubServer) -> Any:
    pools = get(server, "/v1/pools")["pools"]
    if not pools:
        return {"pool": {"state": "", "replaced_nodes": 0, "price_usd_per_hour": 0.0}, "calls": []}
    (pool,) = pools
    return get(server, f"/v1/pools/{pool['id']}")
