"""Hugging Face's own callbacks under our Trainer, unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers import Trainer as HFTrainer
from transformers import TrainingArguments as HFArguments

from skyward.training import Trainer, TrainingArguments
from tests.training.events import scalars_in, texts_in, without_tensorflow

without_tensorflow()  # tensorboard would load it


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": ((self.a * x - labels) ** 2).mean(), "logits": self.a * x}


DATA = [{"x": torch.tensor([1.0]), "labels": torch.tensor([2.0])} for _ in range(8)]
GIVEN: dict[str, Any] = {
    "num_train_epochs": 6,
    "per_device_train_batch_size": 4,
    "learning_rate": 2.0,  # it gets worse and worse
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def trainer(folder: Path, *callbacks: Any, **chosen: Any) -> Trainer:
    args = TrainingArguments(output_dir=folder, **{**GIVEN, **chosen})
    return Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=callbacks)


def test_early_stopping_stops_at_the_same_step_as_under_hf(tmp_path: Path) -> None:
    args = HFArguments(output_dir=str(tmp_path / "hf"), report_to=[], **GIVEN)
    data: dict[str, Any] = {"train_dataset": DATA, "eval_dataset": DATA}
    theirs = HFTrainer(Line(), args, **data, callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])
    theirs.train()
    ours = trainer(tmp_path / "ours", EarlyStoppingCallback(early_stopping_patience=2))
    ours.train()
    assert ours.state.global_step == theirs.state.global_step == 6
    assert ours.state.best_metric == pytest.approx(theirs.state.best_metric)
    assert ours.state.best_global_step == theirs.state.best_global_step == 2


NAN = float("nan")
SCORES: dict[str, tuple[list[float], dict[str, Any]]] = {
    "no number at first": ([NAN, NAN, NAN, 1.0, 0.5], {"greater_is_better": False}),
    "greater is better, by how much": ([0.1, 0.5, 0.55, 0.58, 0.9], {"greater_is_better": True}),
    "nothing is loaded": ([3.0, 2.0, 2.5, NAN, 1.0], {"load_best_model_at_end": False, "save_strategy": "no"}),
}


def scored(scores: list[float]) -> Any:
    """Return the metrics of one evaluation after another."""
    left = iter(scores)
    return lambda _: {"score": next(left)}


@pytest.mark.parametrize("name", SCORES)
def test_early_stopping_gets_the_best_metric_as_under_hf(name: str, tmp_path: Path) -> None:
    scores, chosen = SCORES[name]
    given = {**GIVEN, "metric_for_best_model": "score", "learning_rate": 0.1, **chosen}
    ran: list[Any] = []
    for kind, arguments in ((HFTrainer, HFArguments), (Trainer, TrainingArguments)):
        made = kind(
            Line(),
            arguments(output_dir=str(tmp_path / kind.__module__), report_to="none", **given),
            train_dataset=DATA,
            eval_dataset=DATA,
            compute_metrics=scored(scores),
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.1)],
        )
        made.train()
        ran.append((made.state.global_step, made.state.best_metric, made.state.best_global_step))
    assert ran[0] == ran[1]
    assert ran[0][0] < 2 * len(scores)  # it did stop


def test_early_stoppings_patience_is_in_our_checkpoints(tmp_path: Path) -> None:
    one = EarlyStoppingCallback(early_stopping_patience=5)
    trainer(tmp_path, one, num_train_epochs=3).train()
    assert one.early_stopping_patience_counter == 2
    other = EarlyStoppingCallback(early_stopping_patience=3)
    resumed = trainer(tmp_path, other)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.state.global_step == 8  # the third evaluation that is no better, two of them before
    assert other.early_stopping_patience == 3  # as it was made here


def test_output_of_hfs_callbacks_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, PrinterCallback(), ProgressCallback(), num_train_epochs=1).train()
    shown = capsys.readouterr()
    assert "'train_runtime'" in shown.out
    assert "2/2" in shown.err


def test_a_users_callback_for_hf_is_called_as_hf_calls_it(tmp_path: Path) -> None:
    class Mine(TrainerCallback):  # type: ignore[misc]  # it is Any to mypy here
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_step_end(self, arguments: Any, where: Any, flags: Any, model: Any = None, **kwargs: Any) -> Any:
            self.seen.append((where.global_step, type(model).__name__, sorted(kwargs)[:2]))
            flags.should_training_stop = where.global_step == 3
            return flags

    mine = Mine()
    trainer(tmp_path, mine).train()
    assert [step for step, _, _ in mine.seen] == [1, 2, 3]
    assert mine.seen[0][1:] == ("Line", ["eval_dataloader", "lr_scheduler"])
    assert (tmp_path / "checkpoint-3").is_dir()


def test_hfs_tensorboard_integration_runs_under_ours(tmp_path: Path) -> None:
    from transformers.integrations import TensorBoardCallback

    from skyward.training import WeightNormLogger

    trainer(tmp_path, WeightNormLogger(), TensorBoardCallback(), num_train_epochs=1).train()
    (folder,) = {each.parent for each in tmp_path.rglob("events.out.*")}
    scalars = scalars_in(folder)
    assert [step for step, _ in scalars["train/loss"]] == [1, 2]
    assert {"train/weight_norm", "eval/loss"} <= set(scalars)
    assert json.loads(texts_in(folder)["args"][0][1])["learning_rate"] == 2.0
