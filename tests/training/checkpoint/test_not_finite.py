"""A run that has become NaN deletes no finite checkpoint, and no run resumes from its later ones."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.cli import main
from skyward.errors import UsageError
from skyward.training import Alone, DivergenceDetector
from skyward.training.checkpoint import (
    CheckpointCallback,
    CheckpointCoordinator,
    CheckpointManager,
    FileCheckpoints,
    checkpoints_in,
    latest_checkpoint,
    prune,
)
from skyward.training.checkpoint.finite import is_finite
from tests.training.checkpoint.crew import run_cases
from tests.training.checkpoint.states import Box, part
from tests.training.trainer.regression import Line, callback, run, trainer

ASSETS = Path(__file__).parent / "assets"


def coordinator(folder: object, **options: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator([part("model", Box({"weight": 1}), "global")], output_dir=str(folder), **options)


def steps(folder: Path) -> list[int | None]:
    return [each.step for each in checkpoints_in(folder)]


def breaks(at: int, event: str = "on_step_begin") -> object:
    """Return a callback that makes a weight NaN before or in the step after `at`."""

    def handler(state: Any, model: Any, **_: Any) -> None:
        if state.global_step == at:
            with torch.no_grad():
                model.a.fill_(math.nan)

    return callback(**{event: handler})


# The Trainer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_diverging_run_keeps_its_last_finite_checkpoint_and_auto_resumes_from_it(
    asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"max_steps": 9, "save_steps": 2, "logging_steps": 1, "save_total_limit": 1}
    run(tmp_path, callbacks=[breaks(at=5), DivergenceDetector()], async_save=asynchronous, **settings)
    assert steps(tmp_path) == [4, 6], "the detector has saved before it stopped"
    assert [each.manifest.is_finite for each in checkpoints_in(tmp_path)] == [True, False]
    begun_at: list[int] = []
    begins = callback(on_train_begin=lambda state, **_: begun_at.append(state.global_step))
    with caplog.at_level(logging.WARNING):
        made = run(tmp_path, callbacks=[begins, DivergenceDetector()], resume_from_checkpoint="auto", **settings)
    assert begun_at == [4]
    assert f"{tmp_path}/checkpoint-6: skipped" in caplog.text
    assert f"resuming from {tmp_path}/checkpoint-4" in caplog.text
    assert made.state.global_step == 9
    assert steps(tmp_path) == [9]


def test_a_run_that_stays_nan_keeps_the_newest_and_the_last_finite_one(tmp_path: Path) -> None:
    run(tmp_path, callbacks=[breaks(at=3)], max_steps=10, save_steps=1, save_total_limit=2)
    assert steps(tmp_path) == [3, 10]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")


def test_weights_broken_by_the_last_step_count_though_its_loss_was_a_number(tmp_path: Path) -> None:
    made = run(
        tmp_path, callbacks=[breaks(at=3, event="on_optimizer_step")], max_steps=4, save_steps=1, logging_steps=1
    )
    assert math.isfinite(made.state.log_history[3]["loss"])
    assert [each.manifest.is_finite for each in checkpoints_in(tmp_path)] == [True, True, True, False]


def test_a_loss_that_is_no_number_counts_though_the_weights_are_finite(tmp_path: Path) -> None:
    class Infinite(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            loss, *rest = super().forward(x, labels)
            return loss * 0 + math.inf, *rest

    run(tmp_path, model=Infinite(), max_steps=1, save_steps=1, learning_rate=0.0)
    (each,) = checkpoints_in(tmp_path)
    assert each.manifest.is_finite is False


def test_without_a_finite_checkpoint_auto_begins_and_true_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, callbacks=[breaks(at=0)], max_steps=2, save_steps=1)
    with pytest.raises(UsageError, match="no checkpoint in "):
        trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    caplog.clear()
    run(tmp_path, max_steps=2, save_steps=1, resume_from_checkpoint="auto")
    assert "resuming from the start" in caplog.text
    assert [each.manifest.is_finite for each in checkpoints_in(tmp_path)] == [True, True]


def test_a_path_is_loaded_whatever_its_loss_was(tmp_path: Path) -> None:
    run(tmp_path, callbacks=[breaks(at=1)], max_steps=2, save_steps=1)
    made = run(tmp_path, max_steps=3, save_steps=1, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert math.isnan(made.model.state_dict()["a"])


# Users' own loops, and other frameworks ------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_uses_the_losses_among_its_metrics(
    asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(coordinator(tmp_path), save_steps=1, save_total_limit=1, asynchronous=asynchronous)
    for step, loss in ((1, 0.5), (2, 0.4), (3, math.nan), (4, math.inf)):
        manager.step(step, metrics={"train_loss": loss, "accuracy": 0.5})
    manager.close()
    assert steps(tmp_path) == [2, 4]
    report = manager.resume()
    assert report is not None
    assert report.step == 2
    assert "checkpoint-4: skipped" in caplog.text
    explicit = manager.resume(4)
    assert explicit is not None
    assert explicit.step == 4
    manager.save(5, metrics={"accuracy": math.nan})
    manager.save(6, is_finite=torch.tensor(False))
    manager.close()
    assert [(each.step, each.manifest.is_finite) for each in checkpoints_in(tmp_path)] == [(5, None), (6, False)]


def test_every_way_to_find_the_newest_skips_checkpoints_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator(tmp_path).save_checkpoint(checkpoint_id=1)
    coordinator(tmp_path, metadata={"is_finite": False}).save_checkpoint(checkpoint_id=2)
    coordinator(tmp_path, metadata={"metrics": {"eval_loss": math.nan}}).save_checkpoint(checkpoint_id=3)
    path = str(tmp_path / "checkpoint-1")
    assert latest_checkpoint(tmp_path) == coordinator(tmp_path).latest() == path
    assert coordinator(tmp_path, on_each_node=True).latest() == path
    assert FileCheckpoints(str(tmp_path), ranks=Alone()).latest() == path
    assert coordinator(tmp_path).load_checkpoint().path == path
    assert coordinator(tmp_path).save_checkpoint().endswith("checkpoint-4"), "numbers go on behind them"
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert [line.endswith("not finite") for line in capsys.readouterr().out.splitlines()[1:]] == [
        False,
        True,
        True,
        False,
    ]


def test_pruning_counts_older_checkpoints_as_finite(tmp_path: Path) -> None:
    shutil.copytree(ASSETS / "v2-run", tmp_path, dirs_exist_ok=True)
    coordinator(tmp_path, metadata={"is_finite": False}).save_checkpoint(checkpoint_id=6)
    prune(tmp_path, keep=1, protect=[])
    assert steps(tmp_path) == [4, 6]
    made = run(tmp_path, max_steps=5, resume_from_checkpoint="auto")
    assert made.state.global_step == 5


def test_the_callback_checks_weights_and_losses(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    saves = CheckpointCallback(tmp_path, save_steps=1, save_total_limit=1, asynchronous=False)
    saves.on_train_begin(ranks=Alone(), model=model)

    class At:
        def __init__(self, step: int) -> None:
            self.global_step = step

    saves.on_step_end(state=At(1))
    saves.on_train_metrics(metrics={"loss": torch.tensor(math.nan)})
    saves.on_step_end(state=At(2))
    saves.on_log(logs={"loss": 1.0})
    saves.on_log(logs={"eval_loss": 1.0})
    torch.nn.init.constant_(model.weight, math.inf)
    saves.on_train_end(state=At(3))
    assert [(each.step, each.manifest.is_finite) for each in checkpoints_in(tmp_path)] == [(1, True), (3, False)]


def test_trained_weights_are_checked_for_finite_values() -> None:
    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3).half(), torch.nn.Linear(3, 3).bfloat16()]
    model = torch.nn.Sequential(*layers)
    model.register_buffer("mask", torch.tensor(-math.inf))
    assert is_finite(model)
    assert is_finite(object())
    torch.nn.init.constant_(layers[1].weight, 60_000)
    assert is_finite(model, 1.0)
    assert not is_finite(model, torch.tensor([math.inf]))
    for layer in layers:
        with torch.no_grad():
            layer.bias[1] = math.nan
        assert not is_finite(model)
        layer.bias.requires_grad = False  # a part that is not trained
        assert is_finite(model)


def one_rank_has_a_loss_that_is_none(ranks: Any, folder: Path) -> Any:
    saves = CheckpointCoordinator([part("model", Box({"rank": 0}), "replicated")], None, ranks, folder)
    manager = CheckpointManager(saves, save_total_limit=1, asynchronous=False)
    manager.save(1, metrics={"loss": 1.0})
    manager.save(2, metrics={"loss": math.nan if ranks.rank == 1 else 1.0})
    ranks.exchange(None)
    return [(each.step, each.manifest.is_finite) for each in checkpoints_in(folder)], Path(saves.latest() or "").name


def test_the_loss_of_any_rank_counts(tmp_path: Path) -> None:
    said = run_cases([one_rank_has_a_loss_that_is_none], world=2, folder=tmp_path)
    for found, latest in said["one_rank_has_a_loss_that_is_none"]:
        assert found == [(1, True), (2, False)]
        assert latest == "checkpoint-1"
