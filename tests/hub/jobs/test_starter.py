"""Starter of runners: it forks them, ends with its launcher, and may die at any time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from skyward import hub
from skyward.hub.runner import starter as starter_module
from skyward.hub.runner.starter import RunnerStarter
from skyward.testing.hub import HubServer
from tests.hub.jobs.calls import add, runs_of, wait_for
from tests.hub.jobs.hub_process import is_runner
from tests.hub.jobs.launcher_process import Launcher
from tests.waiting import until

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher that has started a runner, and has a starter since."""
    folder = tmp_path_factory.mktemp("starter")
    with pytest.MonkeyPatch.context() as patch, HubServer(folder / "hub") as server:
        patch.setenv("SKYWARD_HUB_URL", server.url)
        patch.setenv("SKYWARD_HUB_TOKEN", server.token)
        hub.disconnect()
        machines = {"name": "here", "provider": {"type": "local"}, "nodes": 1}
        assert httpx.post(f"{server.url}/v1/capacity", json=machines, headers=server.headers).status_code == 201
        (folder / "data").mkdir()
        process = Launcher(folder / "data")
        process.start()
        assert hub.submit(add(1, 2)).result(LIMIT_S) == 3
        yield process
        process.close()


def starter_of(launcher: Launcher) -> int:
    """Return the launcher's starter, once it waits for orders."""
    until(lambda: [pid for pid in launcher.starters() if waits(pid)], LIMIT_S)
    (pid,) = launcher.starters()
    return pid


def waits(starter: int) -> bool:
    """Return whether a starter has imported everything: it sleeps, and leaves its children to the kernel."""
    try:
        lines = Path(f"/proc/{starter}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return False
    fields = dict(line.split(":", 1) for line in lines)
    ignored = int(fields["SigIgn"], 16)
    return bool(ignored >> signal.SIGCHLD - 1 & 1) and fields["State"].split()[0] == "S"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_runner_is_forked_and_goes_on_when_starter_and_launcher_end(launcher: Launcher, tmp_path: Path) -> None:
    starter, file = starter_of(launcher), tmp_path / "go"
    until(lambda: not list(launcher.attempts.iterdir()), LIMIT_S)  # the runner that needed none
    job = hub.submit(wait_for(str(file)))
    until(lambda: runs_of(file), LIMIT_S)
    runner = launcher.runner()
    assert parent_of(runner) == starter
    assert (launcher.attempts.parent / "logs" / "starter.log").read_text() == ""
    launcher.kill()
    until(lambda: not launcher.starters(), LIMIT_S)
    launcher.start()
    assert is_runner(runner)
    file.write_text("went on")
    assert job.result(LIMIT_S) == "went on"
    assert len(job.attempts) == 1


def test_starter_that_was_killed_is_replaced_and_costs_no_job_an_attempt(launcher: Launcher) -> None:
    hub.submit(add(1, 2)).result(LIMIT_S)
    killed = starter_of(launcher)
    os.kill(killed, signal.SIGKILL)
    job = hub.submit(add(2, 3))
    assert job.result(LIMIT_S) == 5
    assert len(job.attempts) == 1
    assert starter_of(launcher) != killed


def test_starter_ends_quietly_when_its_launcher_ends_without_reading_its_answer(tmp_path: Path) -> None:
    starter = RunnerStarter(tmp_path / "log", os.environ)
    until(lambda: waits(starter.pid), LIMIT_S)
    starter._socket.close()
    until(lambda: not starter.is_alive, LIMIT_S)
    starter.close()
    assert (tmp_path / "log").read_text() == ""


def test_starter_that_stands_still_is_killed_and_starts_no_runner_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter_module, "ANSWER_S", 0.2)
    (tmp_path / "attempt").mkdir()
    starter = RunnerStarter(tmp_path / "log", os.environ)
    try:
        with (tmp_path / "lock").open("w") as lock, (tmp_path / "runner.log").open("w") as log:
            descriptors = lock.fileno(), log.fileno()
            until(lambda: starter.is_ready, LIMIT_S)
            os.kill(starter.pid, signal.SIGSTOP)
            assert not starter.start(tmp_path / "attempt", os.environ, *descriptors)
        until(lambda: not starter.is_alive, LIMIT_S)
        assert list((tmp_path / "attempt").iterdir()) == []
    finally:
        starter.close()
