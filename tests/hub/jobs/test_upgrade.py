"""A hub that is upgraded while its jobs run: their runners speak the version before, or a later one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from skyward import hub
from skyward.hub.model.jobs import PROTOCOL, PROTOCOLS
from skyward.testing.hub import HubServer
from tests.hub.http.server_processes import free_port
from tests.hub.jobs.calls import runs_of, wait_for
from tests.hub.jobs.launcher_process import Launcher
from tests.hub.search import objectives
from tests.waiting import until

Message = MutableMapping[str, Any]
LIMIT_S = 120.0
_OF_ONE_WAY = (b"host", b"content-length", b"transfer-encoding")


class Wire:
    """Pass requests of launchers and runners on to a hub, and change those that depend on the version.

    Args:
        hub_url: The hub.
        asked: Changes what is sent in a poll or a sign of life.
        answered: Changes the answer to it.
    """

    def __init__(
        self, hub_url: str, asked: Callable[[dict[str, Any]], None], answered: Callable[[dict[str, Any]], None]
    ) -> None:
        self.asked, self.answered = asked, answered
        self.statuses: dict[str, list[int]] = {"poll": [], "beat": []}
        self._hub = httpx.AsyncClient(base_url=hub_url, timeout=60)

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            for wanted in ("startup", "shutdown"):
                assert (await receive())["type"] == f"lifespan.{wanted}"
                if wanted == "shutdown":
                    await self._hub.aclose()
                await send({"type": f"lifespan.{wanted}.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        what = scope["path"].rpartition("/")[2]
        if what in self.statuses:
            changed = json.loads(body)
            self.asked(changed)
            body = json.dumps(changed).encode()
        path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [(name, value) for name, value in scope["headers"] if name not in _OF_ONE_WAY]
        answer = await self._hub.request(scope["method"], path.decode(), content=body, headers=headers)
        content = answer.content
        if what in self.statuses:
            self.statuses[what].append(answer.status_code)
            if answer.is_success:
                changed = answer.json()
                self.answered(changed)
                content = json.dumps(changed).encode()
        head = [(b"content-type", answer.headers.get("content-type", "text/plain").encode())]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": head})
        await send({"type": "http.response.body", "body": content})


@contextmanager
def served(wire: Wire) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(wire, port=port, lifespan="on", log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, LIMIT_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setenv("SKYWARD_HUB_URL", server.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", server.token)
        hub.disconnect()
        machines = {"name": "here", "provider": {"type": "local"}, "nodes": 1}
        assert httpx.post(f"{server.url}/v1/capacity", json=machines, headers=server.headers).status_code == 201
        (tmp_path / "data").mkdir()
        yield server


@contextmanager
def launcher_behind(url: str, data: Path) -> Iterator[Launcher]:
    launcher = Launcher(data, SKYWARD_HUB_URL=url)
    launcher.start()
    try:
        yield launcher
    finally:
        launcher.close()


def speak_before(body: dict[str, Any]) -> None:
    """Make a message one of the version before, whose fields were the same."""
    assert body["protocol"] == PROTOCOL
    body["protocol"] -= 1


def check_before(body: dict[str, Any]) -> None:
    """Check that an answer has nothing that a launcher of the version before would pass over."""
    for launch in body.get("start", ()):
        assert (launch["spec"].pop("trials"), launch["spec"].pop("trial")) == (None, None)


def test_runner_of_the_version_before_works_for_an_upgraded_hub(server: HubServer, tmp_path: Path) -> None:
    assert PROTOCOLS == (PROTOCOL - 1, PROTOCOL)
    wire = Wire(server.url, speak_before, check_before)
    file = tmp_path / "go"
    with served(wire) as url, launcher_behind(url, tmp_path / "data"):
        job = hub.submit(wait_for(str(file)))
        until(lambda: list(job.logs(follow=False)) == ["begins"], LIMIT_S)
        file.write_text("done")
        assert job.result(LIMIT_S) == "done"
        assert list(job.logs()) == ["begins", "ends"]
        assert [attempt.end for attempt in job.attempts] == ["completed"]
    assert set(wire.statuses["poll"]) == {200}
    assert set(wire.statuses["beat"]) == {200}


def test_sweep_over_jobs_waits_for_its_launcher_to_be_upgraded(server: HubServer, tmp_path: Path) -> None:
    is_newer = threading.Event()

    def asked(body: dict[str, Any]) -> None:
        if not is_newer.is_set():
            speak_before(body)

    def answered(body: dict[str, Any]) -> None:
        if not is_newer.is_set():
            check_before(body)

    wire = Wire(server.url, asked, answered)
    with served(wire) as url:
        with launcher_behind(url, tmp_path / "data"):
            options: dict[str, Any] = {"on": "jobs", "strategy": "random", "max_trials": 1, "nodes": 1}
            sweep = hub.sweep(objectives.square, {"x": objectives.SPACE["x"]}, name="upgrade", **options)
            driver = sweep.job
            assert driver is not None
            until(lambda: "upgrade skyward there" in driver.why_waiting, LIMIT_S)
            assert not any(attempt.began_at for attempt in driver.attempts)
        is_newer.set()
        with launcher_behind(url, tmp_path / "data"):
            assert sweep.wait(LIMIT_S).status == "completed"
            assert driver.result(LIMIT_S) == {"sweep": sweep.id, "end": "completed"}  # a little after its sweep
    assert [(attempt.number, attempt.end, attempt.error) for attempt in driver.attempts] == [(1, "completed", "")]


def test_job_goes_on_while_its_hub_does_not_know_the_version_yet(server: HubServer, tmp_path: Path) -> None:
    is_newer = threading.Event()

    def asked(body: dict[str, Any]) -> None:
        body["protocol"] += is_newer.is_set()

    wire = Wire(server.url, asked, lambda body: None)
    file = tmp_path / "go"
    with served(wire) as url, launcher_behind(url, tmp_path / "data"):
        job = hub.submit(wait_for(str(file)))
        until(lambda: bool(runs_of(file)), LIMIT_S)
        is_newer.set()
        until(lambda: 400 in wire.statuses["beat"], LIMIT_S)
        time.sleep(1.0)
        is_newer.clear()  # the hub is upgraded
        file.write_text("done")
        assert job.result(LIMIT_S) == "done"
        assert [attempt.end for attempt in job.attempts] == ["completed"]
    assert len(runs_of(file)) == 1
