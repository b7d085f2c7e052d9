"""Pools of a program with a hub record themselves there."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import hub
from skyward.testing.hub import HubServer
from tests.waiting import until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as made:
        hub.connect(made.url, made.token)
        yield made


def get(server: HubServer, path: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}{path}", headers=server.headers)) as answer:
        return json.load(answer)


def nap(seconds: float, pid: Path | None = None) -> None:
    if pid is not None:
        pid.write_text(str(os.getpid()))
    time.sleep(seconds)


def test_a_pool_is_recorded_with_nodes_calls_and_end(server: HubServer) -> None:
    with sky.ComputePool(sky.Local(), nodes=2, logs=False) as pool:
        sky.compute(nap)(0.1) @ pool
        with pytest.raises(ZeroDivisionError):
            sky.compute(divmod)(1, 0) >> pool
        running = sky.compute(nap)(3.0) > pool
        until(lambda: [call for call in only(server)["calls"] if call["ended_at"] is None])
        assert only(server)["pool"]["state"] == "open"
        running.result(20)
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


def test_without_a_hub_nothing_is_recorded(spool: Path) -> None:
    with sky.ComputePool(sky.Local(), logs=False) as pool:
        assert sky.compute(abs)(-1) >> pool == 1
    assert not (spool.parent / "pools").exists()


def only(server: HubServer) -> Any:
    pools = get(server, "/v1/pools")["pools"]
    if not pools:
        return {"pool": {"state": "", "replaced_nodes": 0}, "calls": []}
    (pool,) = pools
    return get(server, f"/v1/pools/{pool['id']}")
