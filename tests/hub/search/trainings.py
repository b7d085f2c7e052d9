"""Objectives that train by `skyward.training`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from skyward import hub
from skyward.hub import HubLogger
from skyward.training import Trainer, TrainerCallback, TrainingArguments
from tests.training.frameworks import same_records


class UseRate(TrainerCallback):
    """Train at the trial's rate, whatever the checkpoint says."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def on_train_begin(self, optimizer: Any = None, lr_scheduler: Any = None, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self.rate
        lr_scheduler.base_lrs = [self.rate] * len(lr_scheduler.base_lrs)


def trainer_of(folder: str | Path, callbacks: list[Any], **options: Any) -> Trainer:
    given: dict[str, Any] = {
        **same_records.ARGUMENTS,
        "num_train_epochs": 1000,
        "logging_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        **options,
    }
    args = TrainingArguments(output_dir=folder, **given)
    rows = same_records.rows()
    return Trainer(same_records.Line(), args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)


def fit(trial: hub.Trial) -> None:
    """Train with `HubLogger` alone: it reports, and it stops the training."""
    made = trainer_of(trial.folder, [HubLogger(system_metrics_every_s=None)], max_steps=40, learning_rate=trial["rate"])
    made.train()
    Path(trial.folder, "steps").write_text(str(made.state.global_step))


def fit_interval(trial: hub.Trial) -> None:
    """Train one interval of a member of a population, from the checkpoint of its parent. Its report is its value."""
    assert trial.steps is not None
    first, last = trial.steps
    if trial.number == 1 and trial.attempt < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    callbacks = [UseRate(trial["rate"]), HubLogger(system_metrics_every_s=None)]
    made = trainer_of(
        trial.folder,
        callbacks,
        max_steps=last,
        learning_rate=trial["rate"],
        save_strategy="steps",
        save_steps=last,
        eval_steps=last,
    )
    made.train(resume_from_checkpoint=None if trial.load_from is None else f"{trial.load_from}/checkpoint-{first}")
    assert made.optimizer is not None
    rate = made.optimizer.param_groups[0]["lr"]
    assert rate == trial["rate"], (rate, trial["rate"])
    assert made.state.global_step == last
