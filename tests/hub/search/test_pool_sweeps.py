"""Sweeps in an open pool: their trials, runs and ends, and deaths of nodes and programs."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from optuna.trial import TrialState

import skyward as sky
from skyward import hub
from skyward.calls.compute import as_compute
from skyward.errors import HubError, UsageError
from skyward.hub.client.connection import HubConnection
from skyward.hub.client.optuna_storage import OptunaStorage
from skyward.hub.client.reading import needed_address
from skyward.hub.client.repeated import RepeatedRequests
from skyward.hub.model.sweep_config import parse_config
from skyward.hub.search.driver import SweepDriver, SweepInterrupted
from skyward.hub.search.local import drive
from skyward.hub.search.places import trial_call
from skyward.hub.search.plans import TrialPlan
from skyward.hub.search.records import Sweep
from skyward.hub.search.study import StudySearch
from skyward.testing.hub import HubServer
from tests.hub.search import objectives
from tests.hub.search.objectives import SPACE
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("server")


def test_trials_are_runs_below_that_of_the_sweep_and_the_best_is_found(pool: sky.ComputePool) -> None:
    sweep = hub.sweep(
        objectives.square,
        SPACE,
        name="square",
        max_trials=14,
        base_config={"more": 0.5},
        experiment="squares",
        seed=1,
        pool=pool,
    )
    trials = sweep.trials
    assert (sweep.status, len(trials), {trial.state for trial in trials}) == ("completed", 14, {"completed"})
    assert sweep.best.value == min(trial.value for trial in trials if trial.value is not None)
    assert sweep.best.params["kind"] in ("flat", "steep")
    assert sweep.run is not None
    parent = hub.run(sweep.run)
    assert (parent.name, parent.experiment, parent.status) == ("square", "squares", "completed")
    children = hub.runs(f"tags.`mlflow.parentRunId` = '{sweep.run}'", experiment="squares")
    assert {run.id for run in children} == {trial.run for trial in trials}
    best = hub.run(str(sweep.best.run))
    assert (best.status, best.params["more"], float(best.params["x"])) == ("completed", "0.5", sweep.best.params["x"])
    assert best.name == f"square-{sweep.best.number}"
    assert [found.id for found in hub.sweeps("square")] == [sweep.id]
    # The same name is the same sweep, which is over, and goes on for more trials.
    assert len(hub.sweep(objectives.square, SPACE, name="square", max_trials=14, base_config={"more": 0.5},
                         experiment="squares", pool=pool).trials) == 14  # fmt: skip
    assert len(hub.sweep(objectives.square, SPACE, name="square", max_trials=16, base_config={"more": 0.5},
                         experiment="squares", pool=pool).trials) == 16  # fmt: skip
    with pytest.raises(HubError, match="base_config=.*choose another name"):
        hub.sweep(objectives.square, {"x": [1, 2]}, name="square", pool=pool)


def test_seed_and_one_trial_at_a_time_give_the_same_trials_with_a_pruner_too(pool: sky.ComputePool) -> None:
    def found(name: str) -> list[tuple[Any, ...]]:
        sweep = hub.sweep(
            objectives.descend,
            SPACE,
            name=name,
            metric="loss",
            max_trials=8,
            max_concurrent_trials=1,
            pruner={"type": "median", "startup_trials": 2},
            seed=3,
            pool=pool,
        )
        return [(trial.state, dict(trial.params), trial.values, trial.stopped_by) for trial in sweep.trials]

    first = found("same-1")
    assert first == found("same-2")
    assert Counter(state for state, *_ in first)["pruned"] >= 1
    (sweep,) = hub.sweeps("same-1")
    pruned = next(trial for trial in sweep.trials if trial.state == "pruned")
    history = hub.run(str(pruned.run)).history("loss")
    assert 0 < len(history.steps) < 20
    assert pruned.value == history.values[-1]


def test_pruned_trial_gives_its_slot_to_the_next_one_within_a_second(server: HubServer, pool: sky.ComputePool) -> None:
    sweep = hub.sweep(
        objectives.descend,
        SPACE,
        name="slots",
        max_trials=10,
        max_concurrent_trials=1,
        pruner="median",
        seed=3,
        pool=pool,
    )

    with httpx.Client(base_url=server.url, headers=server.headers) as client:
        rows = client.get(f"/v1/hpo/{sweep.id}/trials").json()["trials"]
    gaps = {
        later["number"]: (later["started_us"] - row["ended_us"]) / 1e6
        for row, later in itertools.pairwise(rows)
        if row["state"] == "pruned"
    }
    assert gaps
    assert min(gaps.values()) < 1.0  # what the sweep waits for is in each of them, what a busy machine adds is not


def test_failed_trial_is_told_as_failed_with_its_error(pool: sky.ComputePool) -> None:
    sweep = hub.sweep(
        objectives.fail_if_negative, SPACE, name="fails", strategy="random", seed=2, max_trials=6, pool=pool
    )
    states = {trial.state: trial for trial in sweep.trials}
    assert set(states) == {"completed", "failed"}
    assert "is negative" in str(states["failed"].error)
    assert hub.run(str(states["failed"].run)).status == "failed"
    assert all(trial.params["x"] >= 0 for trial in sweep.trials if trial.state == "completed")
    with pytest.raises(UsageError, match="no trial is complete; wait for one. The first one failed: ValueError"):
        _ = hub.sweep(objectives.fail_if_negative, {"x": [-1.0]}, strategy="grid", name="all-fail", pool=pool).best


def test_trial_whose_process_dies_begins_again_with_its_number_and_run(pool: sky.ComputePool) -> None:
    sweep = hub.sweep(objectives.die_once, SPACE, name="dies", max_trials=4, max_concurrent_trials=2, pool=pool)
    assert [(trial.number, trial.value) for trial in sweep.trials] == [(0, 1.0), (1, 2.0), (2, 1.0), (3, 2.0)]
    assert {trial.state for trial in sweep.trials} == {"completed"}
    assert hub.run(str(sweep.trials[1].run)).status == "completed"


def test_trial_may_be_a_gang_of_nodes(pool: sky.ComputePool) -> None:
    sweep = hub.sweep(objectives.on_two_nodes, SPACE, name="gang", max_trials=2, pool=pool)
    assert [trial.value for trial in sweep.trials] == [trial.params["x"] for trial in sweep.trials]


def test_several_objectives_have_a_front_and_an_earlier_sweep_is_known(pool: sky.ComputePool) -> None:
    goals: dict[str, Any] = {"metric": ["near", "far"], "direction": ["minimize", "maximize"]}
    first = hub.sweep(
        objectives.two_goals, SPACE, name="goals", strategy="nsga-ii", max_trials=6, seed=1, pool=pool, **goals
    )
    assert len(first.front) == 6  # one is nearer, the other farther
    with pytest.raises(UsageError, match="has several objectives and no best trial; use front"):
        _ = first.best
    second = hub.sweep(
        objectives.two_goals, SPACE, name="more goals", warm_start=[first], max_trials=2, pool=pool, **goals
    )
    assert [trial.run is None for trial in second.trials] == [True] * 6 + [False] * 2


def test_best_trial_becomes_a_version_of_a_model_in_one_call(pool: sky.ComputePool) -> None:
    sweep = hub.sweep(objectives.artifact, SPACE, name="models", max_trials=3, pool=pool)
    assert sweep.register_best("squares", "model") == 1
    with pytest.raises(UsageError, match="artifact_path='weights'"):
        sweep.register_best("squares", "weights")


def test_sweep_is_stopped_from_elsewhere_and_its_trials_end_at_a_report(pool: sky.ComputePool, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    options: dict[str, Any] = {
        "base_config": {"file": str(file), "steps": 600},
        "max_trials": 9,
        "seed": 4,
        "pool": pool,
    }

    def stop() -> None:
        until(lambda: file.exists() and len(file.read_text().splitlines()) == 2, 60)
        (sweep,) = hub.sweeps("stopped")
        assert sweep.status == "running"
        with pytest.raises(UsageError, match="another program runs this sweep"):
            hub.sweep(objectives.note, SPACE, name="stopped", **options)
        sweep.stop()

    other = threading.Thread(target=stop)
    other.start()
    sweep = hub.sweep(objectives.note, SPACE, name="stopped", **options)
    other.join()
    assert sweep.status == "stopped"
    assert [(trial.state, trial.stopped_by) for trial in sweep.trials] == [("pruned", "stopped")] * 2
    with pytest.raises(UsageError, match="no trial is complete"):
        _ = sweep.best


PROGRAM = """
import sys
import skyward as sky
from skyward import hub
from tests.hub.search import objectives

file, url, token, spool = sys.argv[1:]
hub.connect(url, token=token, spool=spool)
with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False, console=False) as pool:
    config = {"file": file, "steps": 6}
    hub.sweep(objectives.note, objectives.SPACE, name="killed", base_config=config, max_trials=10, seed=7, pool=pool)
"""


def test_driver_that_stood_still_for_too_long_ends_and_leaves_the_trials_to_the_next_one(
    server: HubServer, pool: sky.ComputePool, tmp_path: Path
) -> None:
    file = tmp_path / "notes"
    program = PROGRAM.replace('"killed"', '"frozen"').replace('"steps": 6', '"steps": 30')
    command = [sys.executable, "-c", program, str(file), server.url, server.token, str(tmp_path / "spool")]
    frozen = subprocess.Popen(command, cwd=Path(__file__).parents[3], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: file.exists() and file.read_text().count("end") >= 1, 90)
        os.kill(frozen.pid, signal.SIGSTOP)
        config = {"file": str(tmp_path / "others"), "steps": 30}
        with pytest.raises(HubError, match="base_config="):
            hub.sweep(objectives.note, SPACE, name="frozen", base_config=config, max_trials=10, pool=pool)
        config["file"] = str(file)
        sweep = hub.sweep(objectives.note, SPACE, name="frozen", base_config=config, max_trials=4, pool=pool)
        os.kill(frozen.pid, signal.SIGCONT)
        _, errors = frozen.communicate(timeout=60)
    finally:
        frozen.kill()
        frozen.wait()
    assert "another program drives the sweep now" in errors
    trials = sweep.trials
    assert [(trial.number, trial.state) for trial in trials] == [(number, "completed") for number in range(len(trials))]
    assert sweep.status == "completed"


def test_driver_that_stands_still_after_it_saw_its_lease_tells_that_another_one_goes_on(
    server: HubServer, pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop a driver between its look at the lease and a report to the hub; the test before stops it anywhere."""
    monkeypatch.setattr("skyward.hub.search.driver.LEASE_S", 2.0)
    others = RepeatedRequests(needed_address("the test"))
    is_still, goes_on = threading.Event(), threading.Event()
    leases: list[str] = []

    def send_if_awake(self: RepeatedRequests, method: str, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("/lease"):
            leases.append(path)
            assert not is_still.is_set() or goes_on.wait(60)
        return send(self, method, path, *args, **options)

    def report_late(self: StudySearch, plan: TrialPlan, step: int, value: float) -> str:
        is_still.set()
        until(lambda: send(others, "POST", leases[0], {"driver": "another", "lasts_ms": 60_000})["is_held"], 60)
        OptunaStorage(others.address).set_trial_state_values(plan.id, TrialState.COMPLETE, [0.5])
        try:
            return report(self, plan, step, value)
        finally:
            goes_on.set()

    send, report = RepeatedRequests.send, StudySearch.report
    monkeypatch.setattr(RepeatedRequests, "send", send_if_awake)
    monkeypatch.setattr(StudySearch, "report", report_late)
    with pytest.raises(SweepInterrupted, match="another program drives the sweep now"):
        hub.sweep(objectives.descend, SPACE, name="still", max_trials=2, max_concurrent_trials=1, pool=pool)


def test_sweep_goes_on_after_sigkill_of_its_program_without_a_trial_twice_or_lost(
    server: HubServer, pool: sky.ComputePool, tmp_path: Path
) -> None:
    file = tmp_path / "notes"
    command = [sys.executable, "-c", PROGRAM, str(file), server.url, server.token, str(tmp_path / "spool")]
    program = subprocess.Popen(command, cwd=Path(__file__).parents[3])
    try:
        until(lambda: file.exists() and file.read_text().count("end") >= 3, 90)
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
    sweep = hub.sweep(
        objectives.note,
        SPACE,
        name="killed",
        base_config={"file": str(file), "steps": 6},
        max_trials=10,
        pool=pool,
    )
    trials = sweep.trials
    assert [(trial.number, trial.state) for trial in trials] == [(number, "completed") for number in range(10)]
    assert len({trial.params["x"] for trial in trials}) == 10
    begun: dict[int, set[str]] = {}
    for line in file.read_text().splitlines():
        if line.startswith("begin"):
            _, number, x = line.split()
            begun.setdefault(int(number), set()).add(x)
    # A trial that began twice did so with the same parameters.
    assert {number: {repr(trial.params["x"])} for number, trial in enumerate(trials)} == begun


def test_trials_make_way_at_any_time_and_none_is_lost_or_asked_twice(pool: sky.ComputePool, tmp_path: Path) -> None:
    config = {
        "search_space": {"kind": ["looks", "raises", "deaf", "waits"]},
        "strategy": "grid",
        "base_config": {"files": str(tmp_path)},
        "max_concurrent_trials": 4,
        "seed": 1,
    }
    address, function = needed_address("sweeps"), as_compute(objectives.make_way)
    with HubConnection(address) as connection:
        body = {"name": f"makes-way-{uuid.uuid4().hex[:8]}", "key": uuid.uuid4().hex, "config": config}
        row = connection.json("POST", "/v1/hpo", body)

    def run(on_driver: Callable[[SweepDriver], None]) -> str:
        return drive(
            address,
            row,
            parse_config(row["config"]),
            pool,
            trial_call(function),
            launch=function.launch,
            options=function.options,
            spool=tmp_path / "spool",
            on_driver=on_driver,
        )

    def order(driver: SweepDriver) -> None:
        until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, 60)
        driver.save()  # no training takes it, and nothing happens
        driver.make_way()
        (tmp_path / "ordered").touch()

    threads: list[threading.Thread] = []

    def order_later(driver: SweepDriver) -> None:
        threads.append(threading.Thread(target=order, args=(driver,)))
        threads[0].start()

    with pytest.raises(SweepInterrupted, match="have made way"):
        run(order_later)
    threads[0].join()
    sweep = Sweep(address, row)
    before = {trial.number: trial.state for trial in sweep.trials}
    assert set(before.values()) <= {"running", "completed"}
    row["run"] = sweep.run
    (tmp_path / "open").touch()
    assert run(lambda driver: None) == "completed"
    trials = sweep.trials
    assert sorted(trial.params["kind"] for trial in trials) == ["deaf", "looks", "raises", "waits"]
    for trial in trials:
        attempt = 1.0 if before.get(trial.number) != "running" else 2.0
        assert (trial.state, trial.value) == ("completed", attempt), trial
