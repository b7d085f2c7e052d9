"""Trials that train by `skyward.training`: pruned by `HubLogger`, and moved by checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyward as sky
from skyward import hub
from tests.hub.search import trainings

pytestmark = pytest.mark.usefixtures("server")


def test_training_with_the_logger_reports_and_is_stopped_with_a_checkpoint(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    sweep = hub.sweep(
        trainings.fit,
        {"rate": [1e-7, 0.05]},
        name="trainings",
        strategy="grid",
        metric="eval_loss",
        pruner={"type": "threshold", "upper": 0.9, "warmup_steps": 12},
        checkpoint_dir=tmp_path,
        save_stopped=True,
        pool=pool,
    )
    trials = {trial.params["rate"]: trial for trial in sweep.trials}
    bad, good = trials[1e-7], trials[0.05]
    assert (good.state, bad.state, bad.stopped_by) == ("completed", "pruned", "pruned")
    assert sweep.best.number == good.number
    stopped_at = int((tmp_path / f"trial-{bad.number:05d}" / "steps").read_text())
    assert 12 <= stopped_at < 40
    assert (tmp_path / f"trial-{bad.number:05d}" / f"checkpoint-{stopped_at}").is_dir()
    assert int((tmp_path / f"trial-{good.number:05d}" / "steps").read_text()) == 40
    run = hub.run(str(good.run))
    assert (run.status, run.params["rate"]) == ("completed", "0.05")
    assert len(run.history("eval_loss").steps) == 20


def test_population_moves_weights_and_optimizer_by_checkpoints_and_outlives_a_killed_member(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    sweep = hub.sweep(
        trainings.fit_interval,
        {"rate": {"type": "log_uniform", "min": 1e-5, "max": 0.1}},
        name="population",
        strategy="pbt",
        metric="eval_loss",
        population={"size": 4, "generations": 3, "ready_interval": 4},
        checkpoint_dir=tmp_path,
        trial_retries=1,
        seed=5,
        pool=pool,
    )
    trials = sweep.trials
    assert (sweep.status, len(trials)) == ("completed", 12), [trial.error for trial in trials]
    assert [trial.number for trial in trials if trial.state == "failed"] == [1]
    kept = {int(path.name.removeprefix("trial-")) for path in tmp_path.iterdir()}
    assert kept >= {8, 9, 10, 11, sweep.best.number}
    assert len(kept) < 12, "folders from which no member can begin are removed"
    assert (tmp_path / "trial-00011" / "checkpoint-12").is_dir()
    assert sweep.best.value is not None
    first = [trial.value for trial in trials[:4] if trial.value is not None]
    assert sweep.best.value < min(first)
