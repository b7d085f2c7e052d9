"""Objectives of the tests. Pools and jobs import this module by its name."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import skyward as sky
from skyward import hub
from tests.waiting import until

SPACE: dict[str, Any] = {"x": {"type": "uniform", "min": -2, "max": 2}, "kind": ["flat", "steep"]}


def square(trial: hub.Trial) -> float:
    """Return a value that depends on the parameters alone."""
    return float(trial["x"] ** 2 + (trial["kind"] == "steep") + trial.params.get("more", 0))


def descend(trial: hub.Trial) -> None:
    """Report a curve and return nothing; stop when told to."""
    for step in range(20):
        trial.report(abs(trial["x"]) + 1 / (step + 1), step)
        if trial.should_stop:
            return


def two_goals(trial: hub.Trial) -> dict[str, float]:
    return {"near": trial["x"] ** 2, "far": abs(trial["x"])}


def fail_if_negative(trial: hub.Trial) -> float:
    if trial["x"] < 0:
        raise ValueError(f"x={trial['x']:.2f}: is negative")
    return float(trial["x"])


def die_once(trial: hub.Trial) -> float:
    """Kill the process of the first attempt of each second trial, after a report."""
    trial.report(1.0, 0)
    if trial.attempt == 1 and trial.number % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(trial.attempt)


def note(trial: hub.Trial) -> float:
    """Write a line for each begin and end of a trial, and take some time.

    With a `gate`, only the first two trials end before that file is there.
    """
    path = Path(trial["file"])
    with path.open("a") as file:
        file.write(f"begin {trial.number} {trial['x']!r}\n")
    if trial.number >= 2:
        wait_at_gate(trial)
    for step in range(trial["steps"]):
        time.sleep(0.1)
        trial.report(trial["x"] ** 2, step)
        if trial.should_stop:
            break
    with path.open("a") as file:
        file.write(f"end {trial.number}\n")
    return float(trial["x"] ** 2)


@sky.compute(nodes=2)
def on_two_nodes(trial: hub.Trial) -> float:
    info = sky.instance_info()
    assert info is not None
    trial.report(1.0 + (info.rank or 0), 0)  # that of rank 0 counts
    return float(trial["x"] + (info.rank or 0))


def artifact(trial: hub.Trial) -> float:
    run = hub.active_run()
    assert run is not None
    run.log_text("model/weights.txt", str(trial["x"]))
    run.log_metrics({"seen": 1.0}, step=0)
    return float(trial["x"] ** 2)


def save_each_step(trial: hub.Trial) -> float:
    """Go on from the file of the last step. Note each step with the process that took it; the fourth waits for a file.

    Its machine may be killed at any step, and another one goes on behind the last that was saved.
    """
    file, notes = Path(trial.folder, "state.json"), Path(trial["notes"])
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"step": 0, "x": 1.0}
    for step in range(state["step"], trial["steps"]):
        with (notes / str(trial.number)).open("a") as lines:
            lines.write(f"{step} {os.getpid()}\n")
        while step == 3 and not (notes / "gate").exists():
            time.sleep(0.02)
        state = {"step": step + 1, "x": state["x"] * (1 - trial["rate"])}
        new = file.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(file)
        trial.report(state["x"], step)
    return float(state["x"])


def slowly(trial: hub.Trial) -> None:
    """Report the same value until told to stop, or for some seconds."""
    bad = abs(trial["x"]) > 1
    for step in range(300 if bad else 3):
        trial.report(2.0 if bad else 0.5, step)
        if trial.should_stop:
            return
        time.sleep(0.1)


def make_way(trial: hub.Trial) -> float:
    """Wait in the first attempt until told to stop. The kind of the trial decides the rest."""
    files, kind = Path(trial["files"]), trial["kind"]
    (files / f"begun-{trial.number}-{trial.attempt}").touch()
    while trial.attempt == 1 and not (files / "ordered").exists():
        time.sleep(0.01)
    if kind == "deaf":
        trial.report(1.0, 0)
        return float(trial.attempt)
    while trial.attempt == 1 and not trial.should_stop and not (files / "open").exists():
        time.sleep(0.01)
    if kind == "raises" and trial.should_stop:
        raise ValueError("it was stopped in the middle")
    return float(trial.attempt)


def wait_at_gate(trial: hub.Trial) -> None:
    """Wait until the file `gate` of a trial is there, if it has one."""
    gate = trial.params.get("gate")
    if gate is not None:
        until(Path(gate).exists, 120)


def member(trial: hub.Trial) -> float:
    """Train an interval of a member of a population, from the file that another trial's job has saved.

    With a `gate`, only the first interval of each member ends before that file is there.
    """
    state: dict[str, Any] = {"x": 5.0, "jobs": []}
    if trial.load_from is not None:
        state = json.loads(Path(trial.load_from, "state.json").read_text())
    assert trial.steps is not None
    if trial.load_from is not None:
        wait_at_gate(trial)
    for step in range(*trial.steps):
        state["x"] -= trial["rate"] * state["x"]
        trial.report(state["x"], step)
    state["jobs"].append(os.environ["SKYWARD_HUB_JOB"])
    Path(trial.folder, "state.json").write_text(json.dumps(state))
    with Path(trial["file"]).open("a") as file:
        file.write(f"end {trial.number} {trial.load_from}\n")
    return float(state["x"])
