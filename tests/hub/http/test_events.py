"""Live events as a page reads them, and points in each of their forms."""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pyarrow
import pytest

from skyward.testing.hub import HubServer


@contextmanager
def following(
    server: HubServer, headers: dict[str, str], query: dict[str, str] | None = None
) -> Iterator[Iterator[dict[str, Any]]]:
    """Follow the stream of events. The server has begun to collect them when this returns."""
    with (
        httpx.Client(base_url=server.url, headers={**server.headers, **headers}, timeout=60) as client,
        client.stream("GET", "/v1/events", params=query or {}) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        assert answer.headers["cache-control"] == "no-store"
        lines = answer.iter_lines()
        assert next(lines).startswith(":")
        yield messages(lines)


def messages(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    fields: dict[str, Any] = {}
    for line in lines:
        if not line and "data" in fields:
            yield {**fields, "data": json.loads(fields["data"])}
            fields = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def make_run(client: httpx.Client, project: str = "default") -> str:
    made = client.post("/v1/runs", json={}, headers={"X-Skyward-Project": project}).raise_for_status().json()
    return str(made["id"])


def tag(client: httpx.Client, run: str, value: str, project: str = "default") -> None:
    headers = {"X-Skyward-Project": project}
    client.post(f"/v1/runs/{run}/tags", json={"tags": {"a": value}}, headers=headers).raise_for_status()


def test_stream_goes_on_behind_the_last_event_that_was_read(server: HubServer, owner: httpx.Client) -> None:
    run = make_run(owner)
    with following(server, {}, {"run": run}) as events:
        tag(owner, run, "1")
        first = next(events)
    tag(owner, run, "2")
    tag(owner, run, "3")
    with following(server, {"Last-Event-ID": first["id"]}, {"run": run}) as events:
        tag(owner, run, "4")
        values = [next(events)["data"]["detail"]["tags"]["a"] for _ in range(3)]
    assert first["data"]["detail"]["tags"]["a"] == "1"
    assert values == ["2", "3", "4"]


@pytest.mark.parametrize("last", ["x", "-1", "1" * 30, "\u0664".encode().decode("latin-1")])
def test_last_event_that_is_no_number_is_refused(owner: httpx.Client, last: str) -> None:
    answer = owner.get("/v1/events", headers={b"Last-Event-ID": last.encode("latin-1")})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "last-event-id")


def test_stream_tells_of_ones_own_project_only(server: HubServer, owner: httpx.Client) -> None:
    owner.post("/v1/projects", json={"name": "else"}).raise_for_status()
    owner.post("/v1/users", json={"name": "watcher", "is_service": True}).raise_for_status()
    owner.post("/v1/projects/else/members", json={"user": "watcher", "role": "viewer"}).raise_for_status()
    token = owner.post("/v1/tokens", json={"user": "watcher"}).raise_for_status().json()["token"]
    secret, own = make_run(owner), make_run(owner, "else")
    point = {"metrics": [{"key": "loss", "value": 1}]}
    with following(server, {"Authorization": f"Bearer {token}", "Last-Event-ID": "0"}) as events:
        tag(owner, secret, "secret")
        owner.post(f"/v1/runs/{secret}/metrics", json=point).raise_for_status()
        owner.post(f"/v1/runs/{own}/metrics", json=point, headers={"X-Skyward-Project": "else"}).raise_for_status()
        tag(owner, own, "last", "else")
        seen: list[dict[str, Any]] = []
        while "last" not in str(seen) or "points" not in {message["event"] for message in seen}:
            seen.append(next(events))
    assert secret not in str(seen)
    assert {message["data"].get("run", own) for message in seen} == {own}


def test_token_of_a_run_follows_that_run_only(server: HubServer, owner: httpx.Client) -> None:
    run, other = make_run(owner), make_run(owner)
    token = owner.post("/v1/tokens", json={"run": run}).raise_for_status().json()["token"]
    with following(server, {"Authorization": f"Bearer {token}"}) as events:
        tag(owner, other, "secret")
        tag(owner, run, "own")
        assert next(events)["data"]["run"] == run


def test_points_are_the_same_as_json_packed_and_arrow(owner: httpx.Client) -> None:
    run = make_run(owner)
    values = [0.1, -1e300, "NaN", "Infinity", 5e-324]
    metrics = [{"key": "x", "value": value, "step": step, "timestamp": 10 + step} for step, value in enumerate(values)]
    log = {"run_id": run, "metrics": metrics}
    owner.post("/api/2.0/mlflow/runs/log-batch", json=log).raise_for_status()

    def points(kind: str) -> httpx.Response:
        answer = owner.get(f"/v1/runs/{run}/points?key=x", headers={"Accept": kind}).raise_for_status()
        assert answer.headers["content-type"] == kind
        return answer

    plain = points("application/json").json()
    floats = [float(value) for value in plain["values"]]
    body = points("application/octet-stream").content
    (count,) = struct.unpack_from("<q", body)
    assert array("q", body[8 : 8 + 16 * count]).tolist() == plain["steps"] + plain["timestamps"]
    table = pyarrow.ipc.open_stream(points("application/vnd.apache.arrow.stream").content).read_all()
    assert table["step"].to_pylist() == plain["steps"] == list(range(5))
    assert table["timestamp"].to_pylist() == plain["timestamps"]
    for column in (array("d", body[8 + 16 * count :]).tolist(), table["value"].to_pylist()):
        assert all(
            one == other or (math.isnan(one) and math.isnan(other)) for one, other in zip(column, floats, strict=True)
        )


def test_stream_of_a_kind_has_no_other_events_and_no_points(server: HubServer, owner: httpx.Client) -> None:
    run = make_run(owner)
    with following(server, {}, {"kind": "job"}) as events:
        tag(owner, run, "1")
        point = {"metrics": [{"key": "loss", "value": 1.0, "step": 1}]}
        owner.post(f"/v1/runs/{run}/metrics", json=point).raise_for_status()
        job = (
            owner.post("/v1/jobs", json={"name": "first", "spec": {}, "is_held": True}).raise_for_status().json()["id"]
        )
        first = next(events)
    assert (first["event"], first["data"]["kind"], first["data"]["resource"]) == ("job", "job.create", f"job/{job}")
