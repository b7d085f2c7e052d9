"""`/v1/hpo` on both databases: progress, leases, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

CONFIG = {"search_space": {"x": {"type": "uniform", "min": 0, "max": 1}}, "max_trials": 5, "seed": 1}
PARAMETER = {
    "value": 0.5,
    "distribution": '{"name": "FloatDistribution", "attributes": {"low": 0, "high": 1, "log": false, "step": null}}',
}


@pytest.fixture(params=["sqlite", "postgresql"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    url, token = request.getfixturevalue(f"{request.param}_hub")
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        yield client


def start(client: httpx.Client, name: str, **config: Any) -> httpx.Response:
    return client.post("/v1/hpo", json={"name": name, "key": f"{name}-{config}"[:64], "config": {**CONFIG, **config}})


def test_progress_counts_trials_by_state_and_names_the_best_with_its_parameters(client: httpx.Client) -> None:
    directions = {"minimize": "a-low", "maximize": "a-high"}
    for direction, name in directions.items():
        goal = {"metric": "loss", "direction": direction}
        sweep = start(client, name, objective=goal).raise_for_status().json()
        assert (sweep["status"], sweep["best"], sweep["counts"]) == ("interrupted", None, {})
        for number, value in enumerate([2.5, -1e-7, 31.0, "Infinity", None]):
            body: dict[str, Any] = {"key": f"t{number}", "params": {"x": PARAMETER}, "user_attrs": {"run": '"abc"'}}
            if value is not None:
                body |= {"state": "completed", "values": [value]}
            client.post(f"/v1/sweeps/{sweep['id']}/trials", json=body).raise_for_status()
        shown = client.get(f"/v1/hpo/{sweep['id']}").raise_for_status().json()
        assert shown["counts"] == {"completed": 4, "running": 1}
        best = shown["best"]
        assert best["values"] == ([-1e-7] if direction == "minimize" else [31.0])
        assert (best["params"], best["run"], best["error"]) == ({"x": 0.5}, "abc", None)
        trials = client.get(f"/v1/hpo/{sweep['id']}/trials", params={"after": 1, "limit": 2}).json()["trials"]
        assert [trial["number"] for trial in trials] == [2, 3]
    names = [sweep["name"] for sweep in client.get("/v1/hpo").json()["sweeps"]]
    assert names[:2] == ["a-high", "a-low"]
    client.post("/v1/sweeps", json={"name": "study", "key": "s", "directions": ["minimize"]}).raise_for_status()
    assert [sweep["name"] for sweep in client.get("/v1/hpo").json()["sweeps"]] == names


def test_one_program_drives_a_sweep_until_it_gives_up_or_ends_it(client: httpx.Client) -> None:
    path = f"/v1/hpo/{start(client, 'leased').json()['id']}"

    def hold(driver: str, **body: Any) -> dict[str, Any]:
        answer = client.post(f"{path}/lease", json={"driver": driver, "lasts_ms": 60_000, **body})
        return dict(answer.raise_for_status().json())

    assert hold("first") == {"is_held": True, "fence": 1, "is_stopping": False}
    assert not hold("second")["is_held"]
    assert client.get(path).json()["status"] == "running"
    client.post(f"{path}/cancel", json={}).raise_for_status()
    assert hold("first") == {"is_held": True, "fence": 1, "is_stopping": True}
    hold("second", lasts_ms=0, state="failed")  # it does not drive, so it ends nothing
    assert client.get(path).json()["status"] == "running"
    hold("first", lasts_ms=0, state="stopped")
    assert client.get(path).json()["status"] == "stopped"
    assert start(client, "leased").json()["status"] == "interrupted"  # it goes on
    assert hold("second") == {"is_held": True, "fence": 2, "is_stopping": False}


def test_driver_that_was_replaced_begins_no_trial(client: httpx.Client) -> None:
    number = start(client, "fenced").json()["id"]

    def hold(driver: str, lasts_ms: int) -> int:
        body = {"driver": driver, "lasts_ms": lasts_ms}
        return int(client.post(f"/v1/hpo/{number}/lease", json=body).raise_for_status().json()["fence"])

    def begin(key: str, fence: int) -> httpx.Response:
        return client.post(f"/v1/sweeps/{number}/trials", json={"key": key, "fence": fence})

    old = hold("first", 60_000)
    begin("a", old).raise_for_status()
    hold("first", 0)
    begin("b", old).raise_for_status()  # nobody has taken its place
    new = hold("second", 60_000)
    refused = begin("c", old)
    assert (refused.status_code, refused.json()["error"]["field"]) == (409, "fence")
    assert "another program drives the sweep now" in refused.json()["error"]["message"]
    begin("c", new).raise_for_status()
    assert client.get(f"/v1/hpo/{number}").json()["trials"] == 3


def test_another_search_of_the_name_a_study_and_a_wrong_configuration_are_refused(client: httpx.Client) -> None:
    start(client, "taken").raise_for_status()
    assert start(client, "taken", max_trials=9).json()["config"]["max_trials"] == 9
    refused = start(client, "taken", strategy="random")
    assert (refused.status_code, refused.json()["error"]) == (
        409,
        {
            "code": "conflict",
            "message": 'strategy="random": the sweep \'taken\' has "bayesian"',
            "field": "strategy",
            "fix": "choose another name",
        },
    )
    client.post("/v1/sweeps", json={"name": "plain", "key": "p", "directions": ["minimize"]}).raise_for_status()
    assert start(client, "plain").status_code == 409
    assert "max_trials=0" in start(client, "wrong", max_trials=0).json()["error"]["message"]
