"""A server that is killed again and again under load: every acknowledged point and artifact is there, once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from skyward import hub
from skyward.hub.store.check import check_hub
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from tests.hub.http.server_processes import owner_token, until
from tests.hub.http.warm_server import WarmServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = 25
"""Kills on each database: 50 together."""
LONGEST_LIFE_S = 0.3
PATH = "/api/2.0/mlflow"


class Writer(threading.Thread):
    """Log points and files through every death of the server, until told to stop.

    Attributes:
        id: Its run.
        points: Steps of the points that the hub has acknowledged.
        files: Keys of the artifacts that it has acknowledged.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(daemon=True)
        self.id = run_id
        self.points: set[int] = set()
        self.files: set[int] = set()
        self.stopping = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for start in range(0, 10**9, 10):
                if self.stopping.is_set():
                    return
                self.write(range(start, start + 10))
        except BaseException as error:
            self.error = error
            raise

    def write(self, steps: range) -> None:
        raise NotImplementedError


class NumberedWriter(Writer):
    """Our client: its batches are numbered, so it sends each until the hub has it."""

    def __init__(self, run: hub.ActiveRun) -> None:
        super().__init__(run.id)
        self._run = run
        self._logged: set[int] = set()

    def write(self, steps: range) -> None:
        for step in steps:
            self._run.log_metrics({"loss": step}, step=step)
        self._run.log_text(str(steps.start), content(steps.start))
        self._logged.update(steps)
        while not self._run.flush(0.2):
            if self.stopping.is_set():
                return
        self.points = set(self._logged)
        self.files = {step for step in self._logged if step % 10 == 0}


class PlainWriter(Writer):
    """MLflow's requests. None is sent twice: one without an answer may have arrived or not."""

    def __init__(self, url: str, token: str) -> None:
        self.client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"})
        answer = self.client.post(f"{PATH}/runs/create", json={"experiment_id": "0"}).raise_for_status()
        super().__init__(answer.json()["run"]["info"]["run_id"])

    def write(self, steps: range) -> None:
        points = [{"key": "loss", "value": step, "step": step, "timestamp": step} for step in steps]
        try:
            body = {"run_id": self.id, "metrics": points}
            self.client.post(f"{PATH}/runs/log-batch", json=body).raise_for_status()
            self.points.update(steps)
            path = f"{PATH}-artifacts/artifacts/0/{self.id}/artifacts/{steps.start}"
            self.client.put(path, content=content(steps.start)).raise_for_status()
            self.files.add(steps.start)
        except httpx.TransportError:  # the server is dead; the next one will come
            time.sleep(0.02)


def content(step: int) -> str:
    return f"{step} " * 3000


@pytest.fixture
def server(database_url: str, tmp_path: Path) -> Iterator[tuple[WarmServer, str]]:
    token = owner_token(database_url)
    with WarmServer(database_url, tmp_path) as server:
        yield server, token


@pytest.fixture
def writers(server: tuple[WarmServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Writer]]:
    url, token = server[0].url, server[1]
    monkeypatch.setenv("SKYWARD_HUB_SPOOL", str(tmp_path / "spool"))
    hub.connect(url, token)
    runs = [hub.start_run() for _ in range(2)]
    plain = [PlainWriter(url, token) for _ in range(2)]
    writers = [*(NumberedWriter(run) for run in runs), *plain]
    yield writers
    for writer in writers:
        writer.stopping.set()
        if writer.is_alive():
            writer.join(60)
    for writer in plain:
        writer.client.close()
    for run in runs:
        run.end(timeout_s=0.1)  # its server is gone
    hub.disconnect()


def test_every_acknowledged_point_and_artifact_survives_every_kill(
    server: tuple[WarmServer, str], writers: list[Writer], database_url: str, tmp_path: Path
) -> None:
    process, token = server
    pauses = random.Random(50)
    for writer in writers:
        writer.start()
    for _ in range(KILLS):
        counts = [len(writer.points) for writer in writers]
        until(partial(have_grown, process, writers, counts))
        time.sleep(pauses.uniform(0, LONGEST_LIFE_S))  # not for luck: any instant will do
        process.restart()
    until(process.is_ready)
    for writer in writers:
        writer.stopping.set()
        writer.join(60)
        assert writer.error is None
    found = [check_run(process.url, token, writer) for writer in writers]
    process.kill()
    database = Database(database_url)
    faults = list(database.read_and_wait(lambda snapshot: list(check_hub(snapshot, FolderBlobs(tmp_path / "blobs")))))
    database.close()
    assert faults == []
    points, files = (sum(counts) for counts in zip(*found, strict=True))
    sent, put = (sum(len(getattr(writer, name)) for writer in writers) for name in ("points", "files"))
    print(f"{KILLS} kills; acknowledged: {sent} points, {put} artifacts; found: {points} points, {files} artifacts")


def have_grown(process: WarmServer, writers: list[Writer], counts: list[int]) -> bool:
    assert process.is_running(), process.log.read_text()
    return all(len(writer.points) > count for writer, count in zip(writers, counts, strict=True))


def check_run(url: str, token: str, writer: Writer) -> tuple[int, int]:
    """Check that a hub has all that it acknowledged, once. Return the number of points and artifacts that it has."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        steps = client.get(f"/v1/runs/{writer.id}/points?key=loss").raise_for_status().json()["steps"]
        assert len(steps) == len(set(steps))
        assert writer.points <= set(steps)
        artifacts = client.get(f"/v1/runs/{writer.id}/artifacts").raise_for_status().json()["artifacts"]
        keys = [int(file["key"]) for file in artifacts]
        assert len(keys) == len(set(keys))
        assert writer.files <= set(keys)
        for key in random.Random(7).sample(keys, min(20, len(keys))):  # `check_hub` reads all of them
            assert client.get(f"/v1/runs/{writer.id}/artifacts/{key}").text == content(key)
    return len(steps), len(keys)
