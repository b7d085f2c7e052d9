"""A served hub as those who operate it see it: health, metrics on a port of their own, and a log of JSON lines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from skyward.hub.http.app import create_app
from skyward.hub.http.settings import local_settings
from tests.hub.http.server_processes import ServerProcess, free_port, owner_token


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/hub.db"


@pytest.fixture
def token(database_url: str) -> str:
    return owner_token(database_url)


@pytest.fixture
def metrics_port() -> int:
    return free_port()


@pytest.fixture
def server(token: str, database_url: str, metrics_port: int, tmp_path: Path) -> Iterator[ServerProcess]:
    environment = {
        "SKYWARD_HUB_METRICS_ENABLED": "true",
        "SKYWARD_HUB_METRICS_PORT": str(metrics_port),
        "SKYWARD_HUB_LOGGING_LEVEL": "debug",
    }
    with ServerProcess(database_url, tmp_path, **environment) as server:
        yield server


def test_requests_are_counted_and_logged_without_secrets(server: ServerProcess, metrics_port: int, token: str) -> None:
    for path, status in (("/ready", "ready"), ("/alive", "alive")):
        assert httpx.get(server.url + path).json()["status"] == status
    headers = {"Authorization": f"Bearer {token}", "X-Request-Id": "of-a-test"}
    run = httpx.post(f"{server.url}/v1/runs", json={}, headers=headers).raise_for_status().json()["id"]
    httpx.get(f"{server.url}/v1/runs/{run}", headers=headers).raise_for_status()
    httpx.get(f"{server.url}/v1/runs/nothing?token={token}", headers=headers)

    text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").raise_for_status().text
    assert 'skyward_hub_api_requests_total{endpoint="POST /v1/runs",status="201"} 1.0' in text
    assert 'skyward_hub_api_requests_total{endpoint="GET /v1/runs/{id}",status="404"} 1.0' in text
    assert 'skyward_hub_api_request_duration_seconds_bucket{endpoint="GET /v1/runs/{id}",le="+Inf"} 2.0' in text
    assert httpx.get(f"http://127.0.0.1:{metrics_port}/v1/runs").status_code == 404
    assert httpx.get(f"{server.url}/metrics", headers=headers).status_code == 404

    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    answered = next(line for line in lines if line.get("request") == "of-a-test")
    assert (answered["level"], answered["route"], answered["status"]) == ("debug", "/v1/runs", 201)
    assert {"time", "logger", "message", "ms"} <= answered.keys()
    assert token not in server.log.read_text()


def test_application_is_ready_on_an_empty_folder_within_0_3_s(tmp_path: Path) -> None:
    async def seconds(folder: Path) -> float:
        began = time.perf_counter()
        app = create_app(local_settings(folder, port=0))
        async with app.router.lifespan_context(app):
            return time.perf_counter() - began

    # One in twenty: what it takes by itself is in each of them, what a busy machine adds is not.
    assert any(asyncio.run(seconds(tmp_path / str(number))) < 0.3 for number in range(20))
