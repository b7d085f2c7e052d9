"""Sweeps as jobs: one job whose pool runs the trials, or a job for each trial."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyward import hub
from skyward.cli import main
from skyward.errors import UsageError
from skyward.hub.client import repeated
from skyward.hub.client.trial import TrialTask, hub_reporter
from tests.hub.jobs.hub_process import HubProcess, is_runner
from tests.hub.search import objectives
from tests.hub.search.objectives import SPACE
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("hub_process")


def test_sweep_is_one_job_whose_trials_are_calls_to_its_pool() -> None:
    sweep = hub.sweep(objectives.square, SPACE, name="one-job", max_trials=6, seed=1, nodes=2)
    again = hub.sweep(objectives.square, SPACE, name="one-job", max_trials=6, nodes=2)  # the same job goes on
    assert sweep.wait(150).status == "completed"
    assert (again.id, [job.name for job in hub.jobs()].count("one-job")) == (sweep.id, 1)
    job = sweep.job
    assert job is not None
    assert job.result(60)["sweep"] == sweep.id
    assert [trial.state for trial in sweep.trials] == ["completed"] * 6
    assert hub.run(str(sweep.best.run)).status == "completed"


@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGTERM])
def test_sweep_goes_on_when_its_runner_ends(ends_by: signal.Signals, hub_process: HubProcess, tmp_path: Path) -> None:
    file, gate = tmp_path / "notes", tmp_path / "gate"
    config = {"file": str(file), "steps": 5, "gate": str(gate)}
    sweep = hub.sweep(objectives.note, SPACE, name=ends_by.name, base_config=config, max_trials=5, seed=2, nodes=1)
    until(lambda: file.exists() and file.read_text().count("end") >= 2, 120)
    for pid in hub_process.runner_pids():
        os.kill(pid, ends_by)
    gate.touch()
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


FILE = """
from skyward import hub
from tests.hub.search import objectives

def note(trial: hub.Trial) -> float:
    return objectives.note(trial)
"""


def test_sweep_over_jobs_goes_on_without_its_caller_its_driver_and_its_hub(
    hub_process: HubProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alone.py").write_text(FILE)
    form = {
        "function": f"{tmp_path}/alone.py:note",
        "search_space": {"x": SPACE["x"]},
        "strategy": "random",
        "seed": 4,
        "max_trials": 6,
        "max_concurrent_trials": 2,
        "base_config": {"file": str(tmp_path / "notes"), "steps": 10, "gate": str(tmp_path / "gate")},
    }
    (tmp_path / "alone.yaml").write_text(json.dumps({**form, "job": {"keep_s": 30.0}}))
    command = [sys.executable, "-m", "skyward", "hpo", "start", "--config", f"{tmp_path}/alone.yaml", "--on", "jobs"]
    subprocess.run(command, check=True, timeout=60, cwd=Path(__file__).parents[3])
    (sweep,) = hub.sweeps("alone")
    driver = sweep.job
    assert driver is not None
    until(lambda: lines_of(tmp_path / "notes")["begin"] >= 2, 120)
    os.kill(runner_of(hub_process, driver), signal.SIGKILL)
    (tmp_path / "gate").touch()
    until(lambda: len(driver.attempts) == 2 and lines_of(tmp_path / "notes")["end"] >= 3, 60)
    hub_process.kill()
    hub_process.start()
    assert sweep.wait(100).status == "completed"
    assert lines_of(tmp_path / "notes") == {"begin": 6, "end": 6}, "no trial began twice"
    assert [trial.state for trial in sweep.trials] == ["completed"] * 6
    assert driver.result(60) == {"sweep": sweep.id, "end": "completed"}
    assert len(driver.attempts) == 2
    assert main(["job", "show", driver.id]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in shown[-6:]] == [[str(n), sweep.jobs[n].id, "completed"] for n in range(5, -1, -1)]
    assert main(["hpo", "show", "alone"]) == 0
    assert "jobs      6 completed" in capsys.readouterr().out
    assert main(["job", "list"]) == 0
    assert "alone-0" not in capsys.readouterr().out
    assert main(["job", "list", "--trials"]) == 0
    assert "alone-0" in capsys.readouterr().out


def test_members_of_a_population_that_are_jobs_go_on_from_checkpoints_of_each_other(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    sweep = hub.sweep(
        objectives.member,
        {"rate": {"type": "log_uniform", "min": 1e-3, "max": 0.5}},
        name="population",
        on="jobs",
        strategy="pbt",
        population={"size": 2, "generations": 3, "ready_interval": 2, "truncation": 0.5},
        checkpoint_dir=tmp_path / "population",
        base_config={"file": str(notes), "gate": str(tmp_path / "gate")},
        seed=1,
        keep_s=30.0,
    )
    driver = sweep.job
    assert driver is not None
    until(lambda: lines_of(notes)["end"] >= 1, 120)
    os.kill(runner_of(hub_process, driver), signal.SIGKILL)
    (tmp_path / "gate").touch()
    assert sweep.wait(100).status == "completed"
    assert lines_of(notes) == {"end": 6}, "no interval was trained twice"
    states = {row["number"]: row["system_attrs"] for row in trial_rows(hub_process, sweep)}
    copies = [
        (number, attrs["skyward:parent"])
        for number, attrs in states.items()
        if attrs["skyward:generation"] and attrs["skyward:member"] != states[attrs["skyward:parent"]]["skyward:member"]
    ]
    assert len(copies) == 2, "one member is the worst of two, twice"
    jobs = {job.name: job.id for job in sweep.jobs}
    for number, parent in copies:
        loaded = json.loads((tmp_path / "population" / f"trial-{number:05d}" / "state.json").read_text())["jobs"]
        assert loaded[-2:] == [jobs[f"population-{parent}"], jobs[f"population-{number}"]]


def test_trial_whose_machine_dies_goes_on_from_its_checkpoint_on_another(tmp_path: Path) -> None:
    steps = 6
    sweep = hub.sweep(
        objectives.save_each_step,
        {"rate": [0.5, 0.25, 0.125]},
        name="machine-dies",
        on="jobs",
        strategy="grid",
        max_concurrent_trials=2,
        base_config={"notes": str(tmp_path), "steps": steps},
        keep_s=30.0,
    )
    driver = sweep.job
    assert driver is not None
    until(lambda: [len(steps_of(tmp_path, number)) for number in (0, 1)] == [4, 4], 60)
    victim = steps_of(tmp_path, 0)[-1][1]
    lost = kill_machine_of(victim)
    until(lambda: len(steps_of(tmp_path, 0)) == 5, 60)
    assert [pid for pid in lost if Path(f"/proc/{pid}/exe").exists()] == [], "two attempts of one job ran at once"
    (tmp_path / "gate").touch()
    assert sweep.wait(60).status == "completed"
    for number in range(3):
        again = [3] if number == 0 else []
        taken = [step for step, _ in steps_of(tmp_path, number)]
        assert taken == sorted([*range(steps), *again]), "it goes on behind its last checkpoint"
    rates = {trial.number: trial.params["rate"] for trial in sweep.trials}
    assert sorted(rates.values()) == [0.125, 0.25, 0.5], "each was asked once"
    ends = {trial.number: (trial.state, trial.value) for trial in sweep.trials}
    assert ends == {number: ("completed", (1 - rate) ** steps) for number, rate in rates.items()}
    attempts = {job.name: [attempt.end for attempt in job.attempts] for job in sweep.jobs}
    once = {f"machine-dies-{number}": ["completed"] for number in (1, 2)}
    assert attempts == {"machine-dies-0": ["lost", "completed"], **once}
    assert driver.result(60) == {"sweep": sweep.id, "end": "completed"}
    assert len(driver.attempts) == 1


def steps_of(notes: Path, trial: int) -> list[tuple[int, int]]:
    """Return each step that a trial began, with the process that took it."""
    path = notes / str(trial)
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


def kill_machine_of(pid: int) -> list[int]:
    """Kill everything that runs on the node of a process, as a machine that dies does. Return the processes."""
    top = psutil.Process(pid)
    while not is_runner((above := top.parent() or top).pid):
        assert above.pid != top.pid, "it has no runner above"
        top = above
    processes = [top, *top.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return [process.pid for process in processes]


def test_reports_of_a_job_wait_for_a_hub_that_is_away(hub_process: HubProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "RETRY_S", 0.2)
    with hub_process.client() as client:
        new = {"name": "away", "key": "away", "directions": ["minimize"]}
        sweep = client.post("/v1/sweeps", json=new).json()["id"]
        trial = client.post(f"/v1/sweeps/{sweep}/trials", json={"key": "first"}).json()["id"]
    report = hub_reporter(TrialTask(sweep="away", number=0, trial=trial, params={}))
    assert report(0, 3.0) == ""
    hub_process.kill()
    assert [report(1, 2.0), report(2, 1.0)] == ["", ""], "the trial goes on"
    hub_process.start()
    with hub_process.client() as client:
        body = {"key": "stop", "system_attrs": {"skyward:stop": '"pruned"'}}
        assert client.patch(f"/v1/trials/{trial}", json=body).status_code == 200
        assert report(3, 0.5) == "pruned"
        steps = client.get(f"/v1/trials/{trial}").json()["steps"]
    assert [(step["step"], step["value"]) for step in steps] == [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.5)]


def test_gpus_of_a_trial_that_is_a_job_need_a_type() -> None:
    with pytest.raises(UsageError, match=r"resources_per_trial.gpus=1: a job counts devices of one type"):
        hub.sweep(objectives.square, SPACE, name="gpus", on="jobs", resources_per_trial={"gpus": 1})


@pytest.mark.parametrize(("folder", "problem"), [(None, "members of a population copy"), ("here", "absolute path")])
def test_population_of_jobs_needs_a_folder_that_all_of_them_see(folder: str | None, problem: str) -> None:
    with pytest.raises(UsageError, match=f"checkpoint_dir={folder!r}: .*{problem}"):
        hub.sweep(objectives.member, SPACE, name="nowhere", on="jobs", strategy="pbt", checkpoint_dir=folder)


def test_cancelled_sweep_ends_its_trials_and_goes_on_when_it_is_started_again(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"

    def start() -> hub.Sweep:
        return hub.sweep(
            objectives.note,
            SPACE,
            name="again",
            on="jobs",
            strategy="random",
            max_trials=3,
            max_concurrent_trials=2,
            base_config={"file": str(notes), "steps": 3000},
            keep_s=30.0,
        )

    sweep = start()
    until(lambda: lines_of(notes)["begin"] == 2, 120)
    driver = sweep.job
    assert driver is not None
    os.kill(runner_of(hub_process, driver), signal.SIGTERM)  # its machine shuts down
    until(lambda: len(driver.attempts) == 2 and driver.status == "running", 60)
    assert driver.attempts[0].end == "stopped"
    assert {job.status for job in sweep.jobs} == {"running"}, "the trials go on"
    assert driver.cancel()
    with pytest.raises(CancelledError):
        driver.result(60)
    until(lambda: {job.status for job in sweep.jobs} == {"cancelled"}, 60)
    assert sweep.status == "interrupted"
    assert start().id == sweep.id
    until(lambda: lines_of(notes)["begin"] == 4, 60)
    sweep.stop()
    assert sweep.wait(60).status == "stopped"
    assert [(trial.state, trial.stopped_by) for trial in sweep.trials] == [("pruned", "stopped")] * 2
    assert {job.status for job in sweep.jobs} == {"completed"}


def runner_of(hub_process: HubProcess, job: hub.Job[Any]) -> int:
    """Return the process of the first attempt of a job."""
    return int((hub_process.data / "launcher" / "attempts" / f"{job.id}-1" / "pid").read_text())


def trial_rows(hub_process: HubProcess, sweep: hub.Sweep) -> list[dict[str, Any]]:
    with hub_process.client() as client:
        rows: list[dict[str, Any]] = client.get(f"/v1/sweeps/{sweep.id}/trials", params={"since": 0}).json()["trials"]
    return [{**row, "system_attrs": {k: json.loads(v) for k, v in row["system_attrs"].items()}} for row in rows]


def lines_of(file: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in file.read_text().splitlines()) if file.exists() else Counter()


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
    assert sweep.wait(150).status == "completed"
    states = Counter(trial.state for trial in sweep.trials)
    assert states["completed"] >= 1
    assert states["pruned"] >= 1
    assert sum(states.values()) == 5
    driver = sweep.job
    assert driver is not None
    assert driver.result(60) == {"sweep": sweep.id, "end": "completed"}
    assert [list(attempt.nodes) for attempt in driver.attempts] == [[]], "it holds no machines"
    jobs = [job for job in hub.jobs() if job.name.startswith("jobs-")]
    assert Counter(job.status for job in jobs) == {"completed": 5}
    assert jobs[0].attempts[0].end == "completed"
