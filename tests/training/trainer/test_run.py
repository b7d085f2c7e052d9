"""The parts of a Trainer without a Trainer: a run's cadence and state, and saves of any component."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from skyward.training import Alone, CallbackHandler, SharingPattern, StateComponent, TrainingArguments
from skyward.training.checkpoint import checkpoints_in
from skyward.training.trainer.run import TrainerRun
from skyward.training.trainer.saver import CheckpointParts, Saver
from tests.training.trainer.regression import callback


def run_of(args: TrainingArguments, *callbacks: object) -> TrainerRun:
    handler = CallbackHandler(list(callbacks), ranks=Alone())
    return TrainerRun(args, ranks=Alone(), device=torch.device("cpu"), callbacks=handler, context=dict)


def step(run: TrainerRun, loss: float = 1.0) -> None:
    run.begin_step()
    run.record.add(torch.tensor(loss), tokens=3, flos=1.0)
    run.end_step(rounds=1, norm=torch.tensor(0.5), rate=0.1, loss=torch.tensor(loss))


def test_a_run_sets_flags_by_its_cadence_and_ends_with_its_steps(tmp_path: Path) -> None:
    args = TrainingArguments(tmp_path, num_train_epochs=2, logging_steps=2, save_strategy="epoch", use_cpu=True)
    run = run_of(args)
    run.set_length(3)
    assert (run.state.max_steps, run.state.num_train_epochs) == (6, 2)
    flags = []
    for _ in range(2):
        for _ in range(3):
            step(run)
            flags.append((run.control.should_log, run.control.should_save, run.control.should_training_stop))
        run.end_epoch()
        assert run.is_scheduled
    assert [each[0] for each in flags] == [False, True, False, True, False, True]
    assert [each[1:] for each in flags] == [(False, False)] * 5 + [(False, True)]
    assert (run.state.global_step, run.position.epoch, run.position.rounds) == (6, 2, 0)


def test_a_run_continues_from_its_state_with_the_same_sums(tmp_path: Path) -> None:
    args = TrainingArguments(tmp_path, max_steps=9, use_cpu=True)
    first, second = run_of(args), run_of(args)
    first.set_length(4)
    step(first, 1.0)
    step(first, 3.0)
    second.load_state_dict(first.state_dict())
    assert (second.state.global_step, second.position.rounds) == (2, 2)
    assert second.drain()[:2] == (2.0, 6)


class Saved:
    """Component with a model and nothing else."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Linear(1, 1)

    def get_state_components(self, *, for_saving: bool = False) -> list[StateComponent]:
        return [StateComponent("model", self.model, SharingPattern.GLOBAL)]

    def get_process_groups(self) -> dict[str, Any]:
        return {}


def test_a_saver_reports_each_save_once_and_loads_it(tmp_path: Path) -> None:
    told: list[int] = []
    args = TrainingArguments(tmp_path, max_steps=9, save_total_limit=1, async_save=True, use_cpu=True)
    run = run_of(args, callback(on_save=lambda saved_step, **_: told.append(saved_step)))
    run.set_length(4)
    savable = Saved()
    saver = Saver(args, savable, run=run, ranks=Alone(), checkpoints=None)
    assert saver.begin("auto") is None
    for _ in range(2):
        step(run)
        saver.save(is_needed=True)
    saver.report_durable(waits=True)
    saver.report_durable(waits=True)
    assert told == [1, 2]
    assert [each.step for each in checkpoints_in(tmp_path)] == [2]
    weight = next(savable.model.parameters()).item()
    nn.init.zeros_(next(savable.model.parameters()))
    path = saver.choose(True, CheckpointParts())
    assert path == str(tmp_path / "checkpoint-2")
    assert saver.begin(None) == (path, CheckpointParts())
    saver.load(path)
    assert next(savable.model.parameters()).item() == weight
