"""Sweeps whose job makes way: their trials save, and go on later as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from skyward import hub
from tests.hub.jobs.calls import add
from tests.hub.jobs.hub_process import HubProcess
from tests.hub.search import trainings
from tests.waiting import until

pytest.importorskip("torch")

CORES = os.cpu_count() or 1
STEPS = 30
PRELOAD = ["torch", "torch._dynamo"]  # once on each node: each trial would import them for two seconds
KINDS = ["logger", "control", "plain"]


def steps_of(notes: Path, trial: int) -> list[tuple[int, int]]:
    """Return attempt and step of each step that a trial trained, in their order."""
    path = notes / str(trial)
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


def start(name: str, notes: Path, *, nodes: int = 1) -> hub.Sweep:
    """Start a sweep. Urgent work that needs all cores takes the place of one on any number of nodes."""
    notes.mkdir()
    return hub.sweep(
        trainings.fit_and_make_way,
        {"kind": KINDS},
        name=name,
        strategy="grid",
        metric="eval_loss",
        base_config={"steps": STEPS, "notes": str(notes)},
        seed=1,
        nodes=nodes,
        concurrency=3,
        preload=PRELOAD,
    )


def until_all_train(notes: Path) -> None:
    until(lambda: all(len(steps_of(notes, trial)) >= 4 for trial in range(len(KINDS))), 120)


def check_trials(sweep: hub.Sweep, notes: Path, tmp_path: Path) -> None:
    """Check that each trial was trained once as a whole, and ended as one that nothing disturbed."""
    trials = sweep.trials
    assert [(trial.number, trial.state) for trial in trials] == [(number, "completed") for number in range(3)]
    alone = trainings.trainer_of(tmp_path / "alone", [], max_steps=STEPS, learning_rate=0.01)
    alone.train()
    whole = {"plain": pytest.approx(0.99**STEPS)} | dict.fromkeys(KINDS[:2], trainings.weight_of(alone))
    for trial in trials:
        kind = trial.params["kind"]
        assert trial.value == whole[kind], kind
        run = hub.run(str(trial.run))
        assert run.status == "completed"
        points = list(run.history("eval_loss").steps)
        assert points == list(range(1, STEPS + 1) if kind == "plain" else range(2, STEPS + 1, 2)), kind


def test_trials_save_make_way_for_urgent_work_and_go_on_without_a_seam(hub_process: HubProcess, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    sweep = start("makes-way", notes, nodes=CORES)
    until_all_train(notes)
    urgent = hub.submit(add(1, 2), nodes=CORES, priority="high")
    assert urgent.result(120) == 3
    (notes / "gate").touch()
    sweep.wait(150)
    job = sweep.job
    assert job is not None
    job.result(60)
    assert [attempt.end for attempt in job.attempts] == ["stopped", "completed"]
    assert job.attempts[0].error == f"makes way for job {urgent.id}"
    for trial in range(len(KINDS)):
        steps = steps_of(notes, trial)
        assert [step for _, step in steps] == list(range(1, STEPS + 1)), "each step was trained once"
        assert {attempt for attempt, _ in steps} == {1, 2}
    check_trials(sweep, notes, tmp_path)
    with hub_process.client() as client:
        events = client.get(f"/v1/jobs/{job.id}/history").json()["events"]
    saves = {Path(event["save"]["path"]).parent.name for event in events if event["kind"] == "saved"}
    saving = {f"trial-{trial.number:05d}" for trial in sweep.trials if trial.params["kind"] != "plain"}
    assert saves == saving, "the job's page shows what its trials have saved"
    hub_process.until_clean()


@pytest.mark.parametrize("killed", ["runner", "hub"])
def test_trials_go_on_when_a_process_is_killed_while_they_make_way(
    hub_process: HubProcess, tmp_path: Path, killed: str
) -> None:
    notes = tmp_path / "notes"
    sweep = start(f"killed-{killed}", notes)
    until_all_train(notes)
    (runner,) = hub_process.runner_pids()
    urgent = hub.submit(add(1, 2), nodes=CORES, priority="high")
    job = sweep.job
    assert job is not None
    until(lambda: job.status != "running", 60)
    if killed == "runner":
        with contextlib.suppress(ProcessLookupError):  # it has made way already: any moment will do
            os.kill(runner, signal.SIGKILL)
    else:
        hub_process.kill()
        hub_process.start()
    assert urgent.result(120) == 3
    (notes / "gate").touch()
    sweep.wait(150)
    assert job.result(60)["end"] == "completed"
    assert len(job.attempts) == 2
    check_trials(sweep, notes, tmp_path)
    hub_process.until_clean()
