"""Faults around jobs, with real processes: a database that restarts, wrong clocks, floods of output, dead hosts."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from skyward import hub
from skyward.errors import HubError, JobFailed
from skyward.hub.client import capacity, people
from tests.hosts.base import clock_library
from tests.hub.http.server_processes import ServerProcess, owner_token
from tests.hub.jobs.calls import GIB, LINE, add, flood, large, runs_of, wait_for
from tests.hub.jobs.hub_process import HubProcess
from tests.hub.jobs.launcher_process import Launcher
from tests.hub.postgres import PostgresServer
from tests.waiting import until

KEPT = 256 << 20


def available_memory() -> int:
    """Return the bytes that processes can get now."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return 1024 * int(line.split()[1])


def length_of(process: HubProcess, path: str) -> int:
    """Read an answer to its end and return its bytes. httpx takes five times the processor time."""
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)
    with closing(connection):
        connection.request("GET", path, headers={"Authorization": f"Bearer {process.token}"})
        answer, piece, length = connection.getresponse(), bytearray(1 << 20), 0
        assert answer.status == 200
        while read := answer.readinto(piece):
            length += read
        return length


@contextmanager
def shared_hub(
    database_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **environment: str
) -> Iterator[ServerProcess]:
    """Serve a hub on PostgreSQL, with a launcher beside it that has `environment`, and two nodes on this machine."""
    token = owner_token(database_url)
    with ServerProcess(database_url, folder) as server:
        monkeypatch.setenv("SKYWARD_HUB_URL", server.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", token)
        hub.disconnect()
        capacity.declare("here", {"type": "local"}, nodes=2)
        (folder / "data").mkdir()
        launcher = Launcher(folder / "data", **environment)
        launcher.start()
        try:
            yield server
        finally:
            launcher.close()
            hub.disconnect()


def test_jobs_go_on_while_postgresql_restarts_under_load(
    postgres: PostgresServer, postgres_template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_hub(postgres.new_database(postgres_template), tmp_path, monkeypatch):
        file = tmp_path / "go"
        long = hub.submit(wait_for(str(file)))
        short = [hub.submit(add(number, 1), keep_s=30.0) for number in range(4)]
        until(lambda: bool(runs_of(file)), 90)
        postgres.stop()
        time.sleep(1.0)
        postgres.start()
        file.write_text("went on")
        assert long.result(100) == "went on"
        assert [job.result(100) for job in short] == [1, 2, 3, 4]
        assert len(runs_of(file)) == 1
        assert list(long.logs()) == ["begins", "ends"]


def test_clock_of_a_launcher_that_is_off_by_an_hour_changes_nothing(
    postgres: PostgresServer, postgres_template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"LD_PRELOAD": str(clock_library()), "SKYWARD_TESTS_CLOCK_S": "-3600"}
    with shared_hub(postgres.new_database(postgres_template), tmp_path, monkeypatch, **wrong):
        began = time.time()
        first = hub.submit(add(1, 2), keep_s=20.0)
        assert first.result(100) == 3
        assert hub.submit(add(3, 4), keep_s=20.0).result(60) == 7
        late = hub.submit(wait_for(str(tmp_path / "never")), max_duration_s=2.0)
        with pytest.raises(JobFailed, match="its time is over"):
            late.result(60)
        (attempt,) = first.attempts
        assert began - 5 < (attempt.began_at or 0) / 1000 < (attempt.ended_at or 0) / 1000 < time.time() + 5


def test_output_of_a_gigabyte_is_cut_and_counted_and_the_hub_answers_meanwhile(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    job = hub.submit(flood(str(end)))
    waits = []
    with hub_process.client() as client:
        while not job.done():
            asked = time.monotonic()
            client.get("/v1/jobs").raise_for_status()
            waits.append(time.monotonic() - asked)
            if job.attempts and job.attempts[0].output_bytes >= KEPT:
                end.touch()
            time.sleep(0.2)
    assert job.result() >= GIB // LINE
    assert statistics.median(waits) < 10
    assert KEPT <= job.attempts[0].output_bytes < KEPT + 2 * LINE
    *_, last = job.logs(start=KEPT - 4 * LINE, follow=False)
    assert last == "[skyward] the output is too long; the rest is left out"
    job.delete()


@pytest.mark.skipif(available_memory() < 12 << 30, reason="the node and the runner hold the value twice each")
def test_value_of_two_gigabytes_comes_whole(hub_process: HubProcess) -> None:
    size = 2 << 30
    job = hub.submit(large(size))
    until(job.done, 200)
    assert [attempt.end for attempt in job.attempts] == ["completed"]
    assert size < length_of(hub_process, f"/v1/jobs/{job.id}/results/value") < size + 4096
    job.delete()


def test_deleted_project_ends_its_jobs_and_gives_their_machines_back(hub_process: HubProcess, tmp_path: Path) -> None:
    file, machines = tmp_path / "go", {"type": "local"}
    with hub_process.client() as client:
        client.post("/v1/projects", json={"name": "brief"}).raise_for_status()
        capacity.declare("shared", machines, labels=["shared"], projects=["brief", "default"])
        running = hub.submit(wait_for(str(file)), project="brief", labels=["shared"])
        until(lambda: bool(runs_of(file)), 90)
        (pid,) = runs_of(file)
        waiting = hub.submit(add(1, 1), project="brief", labels=["shared"])
        other = hub.submit(add(2, 2), labels=["shared"])
        client.delete("/v1/projects/brief").raise_for_status()
        assert other.result(100) == 4
        assert not Path(f"/proc/{pid}").exists()
        for job in (running, waiting):
            with pytest.raises(HubError):
                _ = job.status
    hub_process.until_clean()
    capacity.remove("shared")


def test_quota_below_the_use_lets_running_jobs_end_and_holds_others_back(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    running = hub.submit(wait_for(str(file)))
    until(lambda: bool(runs_of(file)), 90)
    try:
        capacity.set_quota("default", jobs=0)
        other = hub.submit(add(1, 1))
        until(lambda: "quota" in other.why_waiting or "jobs" in other.why_waiting)
        file.write_text("ended")
        assert running.result(60) == "ended"
        assert other.status == "queued"
    finally:
        capacity.set_quota("default")
    assert other.result(60) == 2


def test_value_and_exception_beyond_the_quota_of_bytes_fail_the_job_once_with_the_hub_s_words(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    files = [tmp_path / "whole", tmp_path / "killed"]
    whole, killed = (hub.submit(wait_for(str(file)), retries=5) for file in files)
    until(lambda: all(runs_of(file) for file in files), 90)
    try:
        people.set_limit("default", "artifact_bytes", 0)
        files[0].write_text(f"of job {whole.id}")  # equal values of other jobs need no room
        os.kill(runs_of(files[1])[0], signal.SIGKILL)
        with pytest.raises(JobFailed, match=r"the hub does not take its value \(artifact_bytes=.* limit of 0"):
            whole.result(60)
        with pytest.raises(JobFailed, match="killed by signal 9.* does not take the exception itself .* limit of 0"):
            killed.result(60)
    finally:
        people.set_limit("default", "artifact_bytes", None)
    assert [attempt.end for job in (whole, killed) for attempt in job.attempts] == ["failed"] * 2


def test_value_that_its_runner_cannot_write_fails_the_job_with_the_reason(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)), retries=5)
    until(lambda: bool(runs_of(file)), 90)
    (hub_process.data / "launcher" / "attempts" / f"{job.id}-1" / "value").mkdir()  # like a full disk
    file.write_text("ended")
    with pytest.raises(JobFailed, match="runner: IsADirectoryError"):
        job.result(60)
    assert [attempt.end for attempt in job.attempts] == ["failed"]


def test_machine_that_accepts_connections_and_never_answers_fails_the_job_with_its_name(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        capacity.declare("silent", {"type": "ssh", "hosts": [host]}, labels=["silent"])
        job = hub.submit(add(1, 1), labels=["silent"], provision_timeout_s=2.0)
        with pytest.raises(JobFailed, match=host):
            job.result(150)
        assert {attempt.end for attempt in job.attempts} == {"start_failed"}
    hub_process.until_clean()
    capacity.remove("silent")
