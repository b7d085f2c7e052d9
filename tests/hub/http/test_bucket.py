"""Artifacts of a hub whose bytes are in a bucket: through the proxy, by presigned URL, and while S3 is away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from skyward.hub.http.settings import read_settings
from skyward.testing.hub import HubServer
from tests.hub.s3 import S3Server

API = "/api/2.0/mlflow-artifacts/artifacts"


@pytest.fixture
def owner(s3: S3Server, tmp_path: Path) -> Iterator[httpx.Client]:
    bucket = s3.new_bucket()
    environment = {
        "SKYWARD_HUB_SERVER_PORT": "0",
        "SKYWARD_HUB_DATABASE_URL": f"sqlite:///{tmp_path}/hub.db",
        "SKYWARD_HUB_STORAGE_BUCKET": bucket.name,
        "SKYWARD_HUB_STORAGE_ENDPOINT": bucket.endpoint,
        "SKYWARD_HUB_STORAGE_REGION": bucket.region,
        "SKYWARD_HUB_STORAGE_ACCESS_KEY": bucket.access_key,
        "SKYWARD_HUB_STORAGE_SECRET_KEY": bucket.secret_key,
    }
    with (
        HubServer(tmp_path, settings=read_settings(None, environment)) as server,
        httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def run_id(owner: httpx.Client) -> str:
    return str(owner.post("/v1/runs", json={}).raise_for_status().json()["id"])


def test_mlflows_proxy_streams_to_and_from_the_bucket(owner: httpx.Client, run_id: str) -> None:
    body = os.urandom(17 << 20)
    owner.put(f"{API}/0/{run_id}/artifacts/model/m.bin", content=body).raise_for_status()
    assert owner.get(f"{API}/0/{run_id}/artifacts/model/m.bin").content == body
    part = owner.get(f"/v1/runs/{run_id}/artifacts/model/m.bin", headers={"Range": "bytes=9000000-9000009"})
    assert (part.status_code, part.content) == (206, body[9_000_000:9_000_010])


def test_a_client_that_wants_it_is_sent_to_the_bucket(owner: httpx.Client, run_id: str) -> None:
    owner.put(f"{API}/0/{run_id}/artifacts/a.html", content=b"<b>").raise_for_status()
    answer = owner.get(f"/v1/runs/{run_id}/artifacts/a.html", params={"redirect": "true"})
    assert answer.status_code == 307
    direct = httpx.get(answer.headers["location"])
    assert direct.content == b"<b>"
    assert direct.headers["content-disposition"] == "attachment"
    read = owner.get("/v1/audit").json()["audit"][0]
    assert (read["action"], read["resource"]) == ("artifact.read", f"run/{run_id}")


def test_while_s3_is_away_artifacts_are_refused_in_words_and_the_rest_goes_on(
    owner: httpx.Client, run_id: str, s3: S3Server
) -> None:
    path = f"{API}/0/{run_id}/artifacts/a.txt"
    owner.put(path, content=b"before").raise_for_status()
    s3.stop()
    try:
        for answer in (owner.get(path), owner.put(path, content=b"after")):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error_code"] == "TEMPORARILY_UNAVAILABLE"
            assert "S3 cannot be used now" in answer.json()["message"]
        metrics = {"metrics": [{"key": "loss", "value": 1.0, "step": 1}]}
        owner.post(f"/v1/runs/{run_id}/metrics", json=metrics).raise_for_status()
        assert owner.get(f"/v1/runs/{run_id}/artifacts").json()["artifacts"][0]["size"] == len(b"before")
        assert owner.get("/ready").status_code == 200
    finally:
        s3.start()
    assert owner.get(path).content == b"before"
    owner.put(path, content=b"after").raise_for_status()
    assert owner.get(path).content == b"after"
