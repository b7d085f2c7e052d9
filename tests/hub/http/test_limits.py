"""Limits of a project over both APIs, and what a client makes of them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from skyward import hub
from skyward.testing.hub import HubServer
from tests.waiting import until

MIB = 1 << 20


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_HUB_SPOOL", str(tmp_path / "spool"))


def set_limits(owner: httpx.Client, project: str, **limits: int | None) -> list[dict[str, object]]:
    answer = owner.patch(f"/v1/projects/{project}/limits", json=limits).raise_for_status()
    return list(answer.json()["limits"])


def test_a_refusal_names_field_value_limit_and_advice_and_asks_for_no_retry(owner: httpx.Client) -> None:
    owner.post("/v1/projects", json={"name": "tiny"}).raise_for_status()
    assert set_limits(owner, "tiny", runs=0) == [
        {"name": "runs", "most": 0, "used": 0},
        {"name": "artifact_bytes", "most": None, "used": 0},
    ]
    tiny = {"X-Skyward-Project": "tiny"}
    owner.post("/v1/runs", json={}).raise_for_status()  # a limit is of one project
    made = owner.post("/v1/experiments", json={"name": "x"}, headers=tiny).raise_for_status().json()
    experiment = {"experiment_id": made["id"]}
    refused = owner.post("/v1/runs", json=experiment, headers=tiny)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["field"]) == (403, "exhausted", "runs")
    assert error["message"] == "runs=1: above this project's limit of 0"
    assert error["fix"].startswith("ask an owner to raise it")
    theirs = owner.post("/api/2.0/mlflow/runs/create", json=experiment, headers=tiny)
    assert (theirs.status_code, theirs.json()["error_code"]) == (403, "RESOURCE_EXHAUSTED")
    assert "runs=1: above this project's limit of 0; ask an owner" in theirs.json()["message"]
    wrong = owner.patch("/v1/projects/tiny/limits", json={"runs": -1})
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "runs")


def test_a_large_upload_beyond_a_limit_is_answered_in_words(server: HubServer, owner: httpx.Client) -> None:
    run = owner.post("/v1/runs", json={}).raise_for_status().json()["id"]
    set_limits(owner, "default", artifact_bytes=MIB)
    body = b"x" * (40 * MIB)
    try:
        for answer in (
            owner.post(f"/v1/runs/{run}/artifacts", params={"key": "big"}, content=body),
            owner.put(f"/api/2.0/mlflow-artifacts/artifacts/0/{run}/artifacts/big", content=body),
        ):
            assert answer.status_code == 403
            assert f"artifact_bytes={40 * MIB}" in answer.text
    finally:
        set_limits(owner, "default", artifact_bytes=None)


def test_a_run_waits_in_its_spool_until_the_limit_is_raised(
    server: HubServer, owner: httpx.Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_limits(owner, "default", artifact_bytes=MIB)
    (tmp_path / "weights").write_bytes(b"w" * (40 * MIB))
    hub.connect(server.url, server.token)
    try:
        with hub.start_run(run_name="large") as run:
            run.log_artifact("weights", tmp_path / "weights")
            run.log_metrics({"loss": 0.5}, step=1)
            until(lambda: "above this project's limit" in caplog.text)
            set_limits(owner, "default", artifact_bytes=None)
        page = owner.get(f"/v1/runs/{run.id}").json()
        assert (page["status"], page["metrics"][0]["value"]) == ("completed", 0.5)
        (listed,) = owner.get(f"/v1/runs/{run.id}/artifacts").json()["artifacts"]
        assert (listed["key"], listed["size"]) == ("weights", 40 * MIB)
    finally:
        hub.disconnect()
        set_limits(owner, "default", artifact_bytes=None)
