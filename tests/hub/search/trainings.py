"""Objectives that train by `skyward.training`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from skyward import hub
from skyward.hub import HubLogger
from skyward.training import Trainer, TrainerCallback, TrainerControlCallback, TrainingArguments
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


class Steps(TrainerCallback):
    """Note each step that is trained."""

    def __init__(self, trial: hub.Trial) -> None:
        self.trial = trial

    def on_step_end(self, state: Any = None, **_: Any) -> None:
        note_step(self.trial, state.global_step)


class Report(TrainerCallback):
    """Report without `HubLogger`, and leave the rest to `TrainerControlCallback`."""

    def __init__(self, trial: hub.Trial) -> None:
        self.trial = trial

    def on_evaluate(self, state: Any = None, metrics: Any = None, **_: Any) -> None:
        self.trial.report(metrics["eval_loss"], state.global_step)


def note_step(trial: hub.Trial, step: int) -> None:
    """Note a step, and take some time. The last step but one waits for the test, or for an order to stop."""
    with Path(trial["notes"], str(trial.number)).open("a") as file:
        file.write(f"{trial.attempt} {step}\n")
    time.sleep(0.02)
    while step == trial["steps"] - 1 and not Path(trial["notes"], "gate").exists() and not trial.should_stop:
        time.sleep(0.02)


def fit_and_make_way(trial: hub.Trial) -> float:
    """Train, and go on from the trial's last checkpoint: by each way in which a trial hears that it shall save."""
    if trial["kind"] == "plain":
        return descend_and_make_way(trial)
    logger = [HubLogger(system_metrics_every_s=None)]
    control = [Report(trial), TrainerControlCallback()]
    callbacks = [Steps(trial), *(logger if trial["kind"] == "logger" else control)]
    made = trainer_of(trial.folder, callbacks, max_steps=trial["steps"], learning_rate=0.01)
    made.train(resume_from_checkpoint=trial.checkpoint)
    return weight_of(made)


def weight_of(trainer: Trainer) -> float:
    return sum(float(parameter.detach().sum()) for parameter in trainer.model.parameters())


def descend_and_make_way(trial: hub.Trial) -> float:
    """Go on from a file in the trial's folder, which is written when the trial shall make way."""
    file = Path(trial.folder, "state")
    first, x = json.loads(file.read_text()) if file.exists() else (0, 1.0)
    for step in range(first + 1, trial["steps"] + 1):
        x *= 0.99
        note_step(trial, step)
        trial.report(x, step)
        if trial.should_stop:
            file.write_text(json.dumps([step, x]))
            break
    return float(x)
