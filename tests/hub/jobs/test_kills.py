"""Processes that are killed while a job runs: it ends as it should, and nothing is left running."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from skyward import hub
from skyward.errors import SlotLost
from tests.hub.jobs.calls import add, runs_of, wait_for
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until


def test_job_goes_on_while_server_scheduler_and_launcher_are_killed_and_replaced(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)))
    until(lambda: job.status == "running", 90)
    until(lambda: bool(runs_of(file)), 90)
    (runner,) = hub_process.runner_pids()
    hub_process.kill()
    file.write_text("went on")
    hub_process.start()
    assert hub_process.runner_pids() in ([runner], [])
    assert job.result(100) == "went on"
    assert len(runs_of(file)) == 1
    assert list(job.logs()) == ["begins", "ends"]
    assert [attempt.end for attempt in job.attempts] == ["completed"]
    hub_process.until_clean()


def test_killed_runner_costs_one_attempt_and_its_machines_are_gone_before_the_next(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)))
    until(lambda: list(job.logs(follow=False)) == ["begins"], 90)
    (runner,) = hub_process.runner_pids()
    os.kill(runner, signal.SIGKILL)
    until(lambda: len(runs_of(file)) == 2, 90)
    first, second = runs_of(file)
    assert not Path(f"/proc/{first}").exists()
    assert Path(f"/proc/{second}").exists()
    file.write_text("again")
    assert job.result(100) == "again"
    assert [attempt.end for attempt in job.attempts] == ["lost", "completed"]
    assert list(job.logs()) == ["begins", "begins", "ends"]
    hub_process.until_clean()


def test_runner_that_is_told_to_end_puts_its_job_back_into_the_queue(hub_process: HubProcess, tmp_path: Path) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)))
    until(lambda: bool(runs_of(file)), 90)
    (runner,) = hub_process.runner_pids()
    os.kill(runner, signal.SIGTERM)  # its machine shuts down
    until(lambda: len(runs_of(file)) == 2, 90)
    file.write_text("moved")
    assert job.result(100) == "moved"
    assert [attempt.end for attempt in job.attempts] == ["stopped", "completed"]
    assert hub.submit(add(1, 1)).result(100) == 2
    hub_process.until_clean()


def test_killed_process_of_the_call_is_a_failure_of_its_user(hub_process: HubProcess, tmp_path: Path) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)), retries=1)
    for run in (1, 2):
        until(lambda run=run: len(runs_of(file)) == run, 90)  # type: ignore[misc]
        os.kill(runs_of(file)[-1], signal.SIGKILL)
    with pytest.raises(SlotLost, match="killed by signal 9"):
        job.result(100)
    assert [attempt.end for attempt in job.attempts] == ["failed", "failed"]
    hub_process.until_clean()
