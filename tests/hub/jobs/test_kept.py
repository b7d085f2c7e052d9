"""Machines that stay between jobs, with real runners: served, given back after their time, and killed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from skyward import hub
from tests.hub.jobs.calls import OwnError, half, place, runs_of, wait_for
from tests.hub.jobs.hub_process import HubProcess, is_runner
from tests.waiting import until


def test_one_runner_serves_jobs_until_nothing_comes(hub_process: HubProcess) -> None:
    first = hub.submit(place(), keep_s=300.0)
    process, calls, folder = first.result(100)
    (runner,) = hub_process.runner_pids()
    assert first.attempts[0].kept_until is not None
    broken = hub.submit(place(True), keep_s=300.0)
    assert isinstance(broken.exception(100), OwnError)
    second = hub.submit(place(), keep_s=2.0)
    later_process, later_calls, later_folder = second.result(100)
    assert (later_process, later_calls - calls, hub_process.runner_pids()) == (process, 2, [runner])
    assert folder.endswith(first.id)
    assert later_folder.endswith(second.id)
    assert [list(job.logs()) for job in (first, broken, second)] == [["call 1"], ["call 2"], ["call 3"]]
    hub_process.until_clean()
    assert first.attempts[0].kept_until is None


def test_map_submits_a_job_for_each_item_and_kept_machines_run_them(hub_process: HubProcess) -> None:
    jobs = hub.map(half, [2, 4, 6, 8, 10, 12], keep_s=60.0, name="halves")
    assert [job.result(100) for job in jobs] == [1, 2, 3, 4, 5, 6]
    assert {job.name for job in jobs} == {"halves"}
    assert len(hub_process.runner_pids()) <= (os.cpu_count() or 1)
    assert hub.map(half, []) == []
    hub_process.end_runners()
    hub_process.until_clean()


def test_command_after_command_on_kept_machines(hub_process: HubProcess, tmp_path: Path) -> None:
    form = {"command": ["sh", "-c", "echo $RANK"], "schedule": {"keep": "60s"}}
    first, second = hub.submit_command(form), hub.submit_command(form)
    assert (first.result(100), second.result(100)) == (0, 0)
    third = hub.submit_command({**form, "command": ["sh", "-c", "echo third; exit 4"]})
    assert third.exception(60) is not None
    assert list(third.logs()) == ["third"]
    # A cancel while it runs ends the machines too.
    file = tmp_path / "runs"
    fourth = hub.submit_command({**form, "command": ["sh", "-c", f"touch {file}; sleep 600"]})
    until(file.exists, 60)
    fourth.cancel()
    until(lambda: fourth.status == "cancelled", 60)
    hub_process.end_runners()  # the other one of the first two may wait still
    hub_process.until_clean()


def test_kill_of_a_runner_that_waits_or_serves_its_second_job(hub_process: HubProcess, tmp_path: Path) -> None:
    first = hub.submit(place(), keep_s=300.0)
    first.result(100)
    (runner,) = hub_process.runner_pids()
    os.kill(runner, signal.SIGKILL)
    file = tmp_path / "go"
    second = hub.submit(wait_for(str(file)), keep_s=300.0)
    until(lambda: len(runs_of(file)) == 1, 90)
    (runner,) = hub_process.runner_pids()
    third = hub.submit(place(), keep_s=300.0)  # on another runner: this one is busy
    third.result(100)
    file.write_text("done")
    assert second.result(60) == "done"
    again = tmp_path / "again"
    jobs = [hub.submit(wait_for(str(again)), keep_s=300.0) for _ in range(2)]
    until(lambda: len(runs_of(again)) == 2, 60)
    assert len(hub_process.runner_pids()) == 2
    os.kill(runner, signal.SIGKILL)  # it serves its second job
    until(lambda: sorted(len(job.attempts) for job in jobs) == [1, 2], 90)
    again.write_text("twice")
    assert [job.result(100) for job in jobs] == ["twice", "twice"]
    lost = max(jobs, key=lambda job: len(job.attempts))
    assert [attempt.end for attempt in lost.attempts] == ["lost", "completed"]
    hub_process.end_runners()
    hub_process.until_clean()


def test_hub_that_is_killed_finds_the_runner_that_waits(hub_process: HubProcess) -> None:
    first = hub.submit(place(), keep_s=300.0)
    process = first.result(100)[0]
    runners = hub_process.runner_pids()
    hub_process.kill()
    hub_process.start()
    assert hub.submit(place(), keep_s=0.0).result(100)[0] == process
    assert set(hub_process.runner_pids()) <= set(runners)
    hub_process.until_clean()


@pytest.mark.parametrize("is_told", [False, True], ids=["after its time", "by SIGTERM"])
def test_machines_that_would_wait_end_while_the_hub_is_away(
    hub_process: HubProcess, tmp_path: Path, is_told: bool
) -> None:
    file = tmp_path / "go"
    # Its output waits for the hub, too. Without output, the file with the value shows that the call has ended.
    job = hub.submit(wait_for(str(file), is_told), keep_s=300.0 if is_told else 0.5)
    until(lambda: job.status == "running" and bool(runs_of(file)), 90)
    (runner,) = hub_process.runner_pids()
    (process,) = runs_of(file)
    hub_process.kill()
    file.write_text("heard later")
    if is_told:
        until((hub_process.data / "launcher" / "attempts" / f"{job.id}-1" / "value").exists)
        os.kill(runner, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{process}").exists())
    assert is_runner(runner)
    hub_process.start()
    assert job.result(60) == "heard later"
    assert list(job.logs()) == ([] if is_told else ["begins", "ends"])
    (attempt,) = job.attempts
    assert (attempt.end, attempt.kept_until) == ("completed", None)
    hub_process.until_clean()


def test_runner_ends_when_its_hub_and_its_folder_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubProcess(tmp_path / "hub") as process:
        monkeypatch.setenv("SKYWARD_HUB_URL", process.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", process.token)
        hub.disconnect()
        assert hub.submit(half(8)).result(100) == 4
        job = hub.submit(wait_for(str(tmp_path / "go")))
        until(lambda: bool(runs_of(tmp_path / "go")), 100)
        runner = int((tmp_path / "hub" / "launcher" / "attempts" / f"{job.id}-1" / "pid").read_text())
        process.kill()
        (tmp_path / "go").write_text("a value that nobody will hear of")
        shutil.rmtree(tmp_path / "hub" / "launcher" / "attempts" / f"{job.id}-1", ignore_errors=True)
        until(lambda: not is_runner(runner), 60)
