"""Several server processes on one PostgreSQL: one hub, whichever of them answers, and whichever of them dies."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.hub.http.server_processes import LIMIT_S, ServerProcess, owner_token, until
from tests.hub.postgres import PostgresServer


@pytest.fixture(scope="module")
def database_url(postgres: PostgresServer, postgres_template: str) -> Iterator[str]:
    url = postgres.new_database(postgres_template)
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="module")
def servers(
    database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers for all tests of this file, since a start takes longer than a test. A test that kills has its own."""
    folder = tmp_path_factory.mktemp("servers")
    with ServerProcess(database_url, folder) as one, ServerProcess(database_url, folder) as two:
        yield one, two


@pytest.fixture(scope="module")
def headers(database_url: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {owner_token(database_url)}"}


def client(server: ServerProcess, headers: dict[str, str]) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=headers, timeout=LIMIT_S)


def messages(answer: httpx.Response) -> Iterator[tuple[str, str, Any]]:
    """Yield (id, event, data) of a stream of server-sent events."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields.get("id", ""), fields["event"], json.loads(fields["data"])
            fields = {}


def test_points_events_and_commands_pass_between_servers(
    servers: tuple[ServerProcess, ServerProcess], headers: dict[str, str]
) -> None:
    with client(servers[0], headers) as one, client(servers[1], headers) as two:
        run = one.post("/v1/runs", json={}).raise_for_status().json()["id"]
        path = f"/v1/runs/{run}"
        with two.stream("GET", "/v1/events", params={"run": run}) as answer:
            stream = messages(answer)
            # A key that the second server learns now is used by the first one, which has never seen it.
            for server, step in ((two, 1), (one, 2)):
                metrics = {"metrics": [{"key": "loss", "value": 0.5, "step": step, "timestamp": step}]}
                started = time.monotonic()
                server.post(f"{path}/metrics", json=metrics).raise_for_status()
                data = next(data for _, event, data in stream if event == "points")
                assert data == {"run": run, "points": {"loss": [[step, step, 0.5]]}}
                print(f"a point was on the page after {time.monotonic() - started:.2f} s")
            one.post(f"{path}/params", json={"params": {"lr": "1"}}).raise_for_status()
            number = next(number for number, event, data in stream if data.get("kind") == "run.params")
        two.post(f"{path}/tags", json={"set": {"a": "b"}})
        two.post(f"{path}/commands", json={"action": "save"}).raise_for_status()
        with one.stream("GET", "/v1/events", params={"run": run}, headers={"Last-Event-ID": number}) as answer:
            kinds = [data["kind"] for _, (_, _, data) in zip(range(1), messages(answer), strict=False)]
            assert kinds[0] in {"run.tags", "run.command"}
        batch = {"client": "c", "first": 1, "records": [["p", {"seed": "1"}]]}
        collected = one.post(f"{path}/batches", json=batch).raise_for_status().json()
        assert [command["action"] for command in collected["commands"]] == ["save"]


def test_a_code_of_one_server_signs_in_at_the_other_once(
    servers: tuple[ServerProcess, ServerProcess], headers: dict[str, str]
) -> None:
    with client(servers[0], headers) as one:
        link = one.post("/v1/users/owner/link", json={}).raise_for_status().json()["link"]
    code = link.rpartition("=")[2].rpartition("/")[2].rpartition("#")[2]
    statuses, cookie = [], ""
    for server in reversed(servers):
        with httpx.Client(base_url=server.url, headers={"Origin": server.url}) as browser:
            answer = browser.post("/v1/session", json={"code": code})
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                cookie = answer.headers["set-cookie"].partition(";")[0]
    assert statuses == [200, 401]
    for server in servers:
        me = httpx.get(f"{server.url}/v1/me", headers={"Origin": server.url, "Cookie": cookie})
        assert me.raise_for_status().json()["user"] == "owner"


@pytest.fixture
def doomed(database_url: str, tmp_path: Path) -> Iterator[ServerProcess]:
    """A third server, to kill."""
    with ServerProcess(database_url, tmp_path) as server:
        yield server


def test_points_that_were_acknowledged_before_a_kill_are_there_once(
    servers: tuple[ServerProcess, ServerProcess], doomed: ServerProcess, headers: dict[str, str]
) -> None:
    other = servers[1]
    acknowledged: list[int] = []
    enough = threading.Event()
    with client(other, headers) as two:
        run = two.post("/v1/runs", json={}).raise_for_status().json()["id"]

    def send(first: int) -> None:
        """Send numbered batches to the server that dies, and each that fails to the other one."""
        with client(doomed, headers) as one, client(other, headers) as two:
            for number in range(1, 41):
                step = first + number
                records = [["m", step, step, {"loss": float(step)}]]
                body = {"client": f"c{first}", "first": number, "records": records}
                try:
                    answer = one.post(f"/v1/runs/{run}/batches", json=body)
                except httpx.TransportError:
                    answer = two.post(f"/v1/runs/{run}/batches", json=body)
                assert answer.raise_for_status().json()["accepted"] == number
                acknowledged.append(step)
                if len(acknowledged) >= 30:
                    enough.set()

    threads = [threading.Thread(target=send, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert enough.wait(LIMIT_S)
    doomed.kill()
    for thread in threads:
        thread.join(LIMIT_S)
    with client(other, headers) as two:
        points = two.get(f"/v1/runs/{run}/points", params={"key": "loss"}).raise_for_status().json()
    assert len(acknowledged) == 160
    assert sorted(points["steps"]) == sorted(acknowledged)


def test_another_server_marks_lost_runs_after_the_leader_is_killed(
    postgres: PostgresServer, postgres_template: str, tmp_path: Path
) -> None:
    url = postgres.new_database(postgres_template)
    headers = {"Authorization": f"Bearer {owner_token(url)}"}
    impatient = {"SKYWARD_HUB_SERVER_LOST_AFTER_S": "1"}

    def leader() -> int | None:
        """Return the process that leads."""
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT holder, expires_at FROM lease").fetchone()
        return int(row[0].split(":")[1]) if row and row[1] else None

    with ServerProcess(url, tmp_path, **impatient) as one, ServerProcess(url, tmp_path, **impatient) as two:
        until(lambda: leader() is not None)
        doomed, other = sorted((one, two), key=lambda server: server.process.pid != leader())
        doomed.kill()
        with client(other, headers) as hub:
            batch = {"client": "c", "first": 1, "records": [["run", {}]]}
            run = f"/v1/runs/{'a' * 32}"
            hub.post(f"{run}/batches", json=batch).raise_for_status()  # and is not heard of again
            until(lambda: hub.get(run).json()["status"] == "lost")
        assert leader() == other.process.pid
        other.process.terminate()
        assert other.process.wait(LIMIT_S) == 0
        assert leader() is None  # given up, so that the next one need not wait


def test_servers_survive_a_restart_of_postgresql(
    servers: tuple[ServerProcess, ServerProcess], headers: dict[str, str], postgres: PostgresServer
) -> None:
    with client(servers[0], headers) as one, client(servers[1], headers) as two:
        run = one.post("/v1/runs", json={}).raise_for_status().json()["id"]
        metrics = {"metrics": [{"key": "loss", "value": 0.5, "step": 1, "timestamp": 1}]}
        one.post(f"/v1/runs/{run}/metrics", json=metrics).raise_for_status()
        postgres.stop()
        try:
            refused = one.post(f"/v1/runs/{run}/metrics", json=metrics)
            assert refused.status_code == 503
            assert "try again later" in refused.text or refused.json()["error"]["fix"] == "try again later"
            assert two.get("/ready").status_code == 503
            assert two.get("/alive").status_code == 200
        finally:
            postgres.start()
        for server in (one, two):
            until(lambda server=server: server.get("/ready").status_code == 200)  # type: ignore[misc]
            server.post(f"/v1/runs/{run}/metrics", json=metrics).raise_for_status()
            assert server.get(f"/v1/runs/{run}/points", params={"key": "loss"}).json()["steps"] == [1]


def test_workers_share_a_port_are_replaced_and_end_together(
    database_url: str, tmp_path: Path, headers: dict[str, str]
) -> None:
    with ServerProcess(database_url, tmp_path, SKYWARD_HUB_SERVER_WORKERS="2") as server:
        until(lambda: len(server.children()) == 2)
        first = server.children()
        os.kill(first[0], signal.SIGKILL)
        until(lambda: len(server.children()) == 2 and first[0] not in server.children())
        assert httpx.get(f"{server.url}/v1/me", headers=headers).status_code == 200
        assert "ended with status -9; another one starts" in server.log.read_text()
        server.process.terminate()
        assert server.process.wait(LIMIT_S) == 0
    with ServerProcess(database_url, tmp_path, SKYWARD_HUB_SERVER_WORKERS="2") as server:
        until(lambda: len(server.children()) == 2)
        orphans = server.children()
        server.kill()
        until(lambda: not any(_lives(pid) for pid in orphans))


def _lives(pid: int) -> bool:
    """Report whether a process runs: one that is dead may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_that_cannot_start_end_the_command_with_the_reason(database_url: str, tmp_path: Path) -> None:
    environment = {"SKYWARD_HUB_SERVER_WORKERS": "2", "SKYWARD_HUB_STORAGE_ENDPOINT": "nonsense"}
    server = ServerProcess(database_url, tmp_path, SKYWARD_HUB_STORAGE_BUCKET="b", **environment)
    with server.start() as process:
        assert process.wait(LIMIT_S) == 1
    log = server.log.read_text()
    assert "storage.endpoint='nonsense'" in log
    assert "Traceback" not in log
