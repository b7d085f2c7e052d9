"""Launchers and runners in processes of their own, killed or stopped while a job runs."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from skyward import hub
from skyward.hub.client.settings import Address
from skyward.hub.runner.launcher import Launcher as FolderLauncher
from skyward.hub.services.jobs import scheduler
from skyward.hub.store.lock import ProcessLock
from skyward.testing.hub import HubServer
from tests.hub.http.server_processes import free_port
from tests.hub.jobs.calls import runs_of, save_when_told, wait_for
from tests.hub.jobs.hub_process import is_runner
from tests.hub.jobs.launcher_process import Launcher
from tests.waiting import until, until_text

LIMIT_S = 120.0


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setenv("SKYWARD_HUB_URL", server.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", server.token)
        hub.disconnect()
        machines = {"name": "here", "provider": {"type": "local"}, "nodes": 1}
        assert httpx.post(f"{server.url}/v1/capacity", json=machines, headers=server.headers).status_code == 201
        (tmp_path / "data").mkdir()
        process = Launcher(tmp_path / "data", "--provider", "local", "--machines", "there")
        process.start()
        yield process
        process.close()


def test_killed_launcher_costs_a_running_job_nothing(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)))
    until(lambda: list(job.logs(follow=False)) == ["begins"], LIMIT_S)
    runner = launcher.runner()
    launcher.kill()
    launcher.start()
    assert is_runner(runner)
    file.write_text("went on")
    assert job.result(LIMIT_S) == "went on"
    assert (len(runs_of(file)), [attempt.end for attempt in job.attempts]) == (1, ["completed"])


@pytest.mark.parametrize("is_made_again", [False, True])
def test_launcher_whose_folder_was_removed_says_so_in_one_line_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_made_again: bool
) -> None:
    folder, ends = tmp_path / "launcher", queue.SimpleQueue[bool]()
    nowhere = Address(url=f"http://127.0.0.1:{free_port()}", token=None, project="default")
    first = FolderLauncher(nowhere, folder)
    thread = threading.Thread(target=lambda: ends.put(first.run()), daemon=True)
    thread.start()
    until(lambda: "did not answer" in caplog.text)
    shutil.rmtree(folder)
    if is_made_again:
        folder.mkdir()
        ProcessLock(folder / "launcher.lock").release()
    assert ends.get(timeout=60) is False
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == f"data={str(folder)!r}: the folder was removed; start the launcher again"
    assert [record for record in caplog.records if record.exc_info] == []


def test_launcher_sends_the_output_of_a_runner_that_was_killed_and_the_end_of_its_log(
    launcher: Launcher, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)))
    until(lambda: list(job.logs(follow=False)) == ["begins"], LIMIT_S)
    launcher.kill()
    os.kill(launcher.runner(), signal.SIGKILL)
    with (launcher.attempts / f"{job.id}-1" / "output").open("a") as output:
        output.write("last words\n")  # as if written a moment before, and not sent yet
    with (launcher.attempts / f"{job.id}-1" / "runner.log").open("a") as log:
        log.write("OSError: No space left\n\n")
    launcher.start()
    file.write_text("again")
    assert job.result(LIMIT_S) == "again"
    assert [attempt.end for attempt in job.attempts] == ["lost", "completed"]
    assert list(job.logs()) == ["begins", "last words", "begins", "ends"]
    assert job.attempts[0].error.endswith("OSError: No space left'")


def test_runner_that_stood_still_beyond_its_lease_is_refused_and_the_value_comes_once(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)), cancel_grace_s=0.2)
    until(lambda: list(job.logs(follow=False)) == ["begins"], LIMIT_S)
    stopped = launcher.runner()
    os.kill(stopped, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "FENCE_S", 1.0)  # instead of 20 minutes
        until(lambda: job.status == "lost", LIMIT_S)
    until(lambda: len(runs_of(file)) == 2, LIMIT_S)
    os.kill(stopped, signal.SIGCONT)
    until(lambda: not is_runner(stopped), LIMIT_S)
    until(lambda: job.status == "running", LIMIT_S)
    file.write_text("once")
    assert job.result(LIMIT_S) == "once"
    assert [attempt.end for attempt in job.attempts] == ["lost", "completed"]
    assert list(job.logs()) == ["begins", "begins", "ends"]


def test_attempt_on_machines_that_stood_still_commits_no_checkpoint_once_the_next_one_has_begun(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of the first attempt stand still beyond their leases, as on a machine that was paused."""
    pytest.importorskip("torch")
    file = tmp_path / "file"
    job = hub.submit(save_when_told(str(file)))
    until(lambda: len(runs_of(file)) == 1, LIMIT_S)
    paused = _processes_of(job.id)
    (rank,) = runs_of(file)
    assert {rank, launcher.runner()} < set(paused)
    try:
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "FENCE_S", 1.0)  # instead of 20 minutes
            until(lambda: job.status == "lost", LIMIT_S)
        until(lambda: len(runs_of(file)) == 2, LIMIT_S)
        file.with_suffix(".1").touch()
        os.kill(rank, signal.SIGCONT)  # before anybody of its own can end it
        assert until_text(file, LIMIT_S).startswith(f"attempt=1: attempt 2 of {job.id} saves in ")
    finally:
        for pid in paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    file.with_suffix(".2").touch()
    assert job.result(LIMIT_S) == 2
    assert [attempt.end for attempt in job.attempts] == ["lost", "completed"]


def _processes_of(job: str) -> list[int]:
    """Return the processes that have the variables of a job: its runner, keeper, agents and ranks."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"SKYWARD_HUB_JOB={job}" in file.read_bytes().decode(errors="replace").split("\0"):
                pids.append(int(file.parent.name))
    return pids
