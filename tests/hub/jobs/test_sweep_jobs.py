"""Sweeps as jobs: one job whose pool runs the trials, or a job for each trial."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from skyward import hub
from tests.hub.jobs.hub_process import HubProcess
from tests.hub.search import objectives
from tests.hub.search.objectives import SPACE
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("hub_process")


def test_sweep_is_one_job_whose_trials_are_calls_to_its_pool() -> None:
    sweep = hub.sweep(objectives.square, SPACE, name="one-job", max_trials=6, seed=1, nodes=2)
    again = hub.sweep(objectives.square, SPACE, name="one-job", max_trials=6, nodes=2)  # the same job goes on
    assert sweep.wait(150).status == "completed"
    assert (again.id, len(hub.jobs())) == (sweep.id, 1)
    job = sweep.job
    assert job is not None
    assert job.result(60)["sweep"] == sweep.id
    assert [trial.state for trial in sweep.trials] == ["completed"] * 6
    assert hub.run(str(sweep.best.run)).status == "completed"


@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGTERM])
def test_sweep_goes_on_when_its_runner_ends(ends_by: signal.Signals, hub_process: HubProcess, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    config = {"file": str(file), "steps": 5}
    sweep = hub.sweep(objectives.note, SPACE, name=ends_by.name, base_config=config, max_trials=5, seed=2, nodes=1)
    until(lambda: file.exists() and file.read_text().count("end") >= 2, 120)
    for pid in hub_process.runner_pids():
        os.kill(pid, ends_by)
    sweep.wait(150)
    trials = sweep.trials
    assert [(trial.number, trial.state) for trial in trials] == [(number, "completed") for number in range(5)]
    begun = {line.split()[1]: line.split()[2] for line in file.read_text().splitlines() if line.startswith("begin")}
    assert begun == {str(trial.number): repr(trial.params["x"]) for trial in trials}
    assert len(sweep.job.attempts) == 2  # type: ignore[union-attr]


def test_sweep_goes_on_when_its_hub_is_killed_and_comes_back(hub_process: HubProcess, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    config = {"file": str(file), "steps": 5}
    sweep = hub.sweep(objectives.note, SPACE, name="hub", base_config=config, max_trials=4, seed=3, nodes=1)
    until(lambda: file.exists() and file.read_text().count("end") >= 1, 120)
    hub_process.kill()
    hub_process.start()
    sweep.wait(150)
    assert [(trial.number, trial.state) for trial in sweep.trials] == [(number, "completed") for number in range(4)]
    lines = [line.split()[0] for line in file.read_text().splitlines()]
    assert lines == ["begin", "end"] * 4, "no trial began twice"


def test_each_trial_is_a_job_that_may_make_way_and_is_pruned_by_its_reports() -> None:
    sweep = hub.sweep(
        objectives.slowly,
        SPACE,
        name="jobs",
        on="jobs",
        max_trials=5,
        max_concurrent_trials=2,
        pruner={"type": "threshold", "upper": 1.0},
        strategy="random",
        seed=1,
        nodes=1,
    )
    assert sweep.status == "completed"
    states = Counter(trial.state for trial in sweep.trials)
    assert states["completed"] >= 1
    assert states["pruned"] >= 1
    assert sum(states.values()) == 5
    jobs = [job for job in hub.jobs() if job.name.startswith("jobs-")]
    assert Counter(job.status for job in jobs) == {"completed": 5}
    row = jobs[0]
    assert row.attempts[0].end == "completed"
