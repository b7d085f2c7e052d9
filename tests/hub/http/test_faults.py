"""Faults that reach a hub from outside, over HTTP: what was acknowledged is there, once."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx

from skyward.testing.hub import HubServer

API = "/api/2.0/mlflow"
SEND = """
import json, random, sys, httpx
url, token, run, seed = sys.argv[1:]
records = [["m", step, step, {"loss": step}] for step in range(2, 61)]
batches = [(first, records[first - 2 : first + 3]) for first in range(2, 61, 5)] * 10
random.Random(int(seed)).shuffle(batches)
with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
    while batches:
        first, batch = batches.pop()
        body = {"client": "c", "first": first, "records": batch}
        accepted = client.post(f"/v1/runs/{run}/batches", json=body).raise_for_status().json()["accepted"]
        if accepted < first - 1:
            batches.insert(0, (first, batch))  # some before it are missing
"""


def test_batch_from_two_processes_ten_times_and_out_of_order_counts_once(
    server: HubServer, owner: httpx.Client
) -> None:
    run = "a" * 32
    first = {"client": "c", "first": 1, "records": [["run", {"experiment": "twice"}]]}
    owner.post(f"/v1/runs/{run}/batches", json=first).raise_for_status()
    command = [sys.executable, "-c", SEND, server.url, server.token, run]
    senders = [subprocess.Popen([*command, str(seed)]) for seed in (1, 2)]
    assert [sender.wait(120) for sender in senders] == [0, 0]
    points = owner.get(f"/v1/runs/{run}/points?key=loss").raise_for_status().json()
    assert points["steps"] == list(range(2, 61))
    assert points["values"] == [float(step) for step in range(2, 61)]


def test_twelve_thousand_metrics_of_one_run_are_logged_and_listed_in_time(owner: httpx.Client) -> None:
    lasted_s = [seconds_of_twelve_thousand_metrics(owner)]
    while min(lasted_s) >= 20 and len(lasted_s) < 3:  # the machine was busy
        lasted_s.append(seconds_of_twelve_thousand_metrics(owner))
    assert min(lasted_s) < 20


def seconds_of_twelve_thousand_metrics(owner: httpx.Client) -> float:
    run = owner.post("/v1/runs", json={}).raise_for_status().json()["id"]
    began = time.monotonic()
    for start in range(0, 12_000, 1000):
        keys = [f"layer.{number}/norm" for number in range(start, start + 1000)]
        metrics = [{"key": key, "value": 1.5, "timestamp": 1, "step": 1} for key in keys]
        owner.post(f"{API}/runs/log-batch", json={"run_id": run, "metrics": metrics}).raise_for_status()
    shown = owner.get(f"/v1/runs/{run}").raise_for_status().json()
    page = owner.get("/v1/runs", params={"filter": "metrics.`layer.11999/norm` > 1"}).raise_for_status().json()
    assert len(shown["metrics"]) == 12_000
    assert run in [found["id"] for found in page["runs"]]
    return time.monotonic() - began


def test_client_whose_clock_is_an_hour_off_keeps_its_times_and_its_run(server: HubServer, owner: httpx.Client) -> None:
    now, hour = int(time.time() * 1000), 3_600_000
    for shift in (-hour, hour):
        run = f"{'b' if shift < 0 else 'c'}" * 32
        facts = {"experiment": "clocks", "started_at": now + shift}
        records = [["run", facts], ["m", 1, now + shift, {"loss": 1}], ["h", now + shift]]
        batch = {"client": "c", "first": 1, "records": records}
        owner.post(f"/v1/runs/{run}/batches", json=batch).raise_for_status()
        shown = owner.get(f"/v1/runs/{run}").json()
        assert (shown["status"], shown["start_time"]) == ("running", now + shift)
        assert abs(shown["heartbeat_at"] - now) < hour / 2, "a heartbeat counts by the hub's own clock"
        points = owner.get(f"/v1/runs/{run}/points?key=loss").json()
        assert points["timestamps"] == [now + shift]
