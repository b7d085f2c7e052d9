"""A run that resumes after any step gives the same weights, losses and logs, to the bit."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyward.errors import CheckpointError, UsageError
from skyward.training import JsonLogger, Trainer
from tests.training.trainer.regression import Line, Points, Stream, callback, history, losses, run, trainer

# Everything that could go wrong: samples in a new order each epoch, dropout and noise from the generators, an optimizer
# with a state, a schedule with a warm-up. Micro-batches do not divide the epoch, and the interval between logs does not
# divide that between saves.
HARD: dict[str, Any] = {
    "num_train_epochs": 3,
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "logging_steps": 3,
    "eval_strategy": "epoch",
    "save_strategy": "steps",
    "save_steps": 1,
    "warmup_steps": 3,
    "lr_scheduler_type": "cosine",
}


class Counting(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """A stream with a state. `read` counts the rows that were ever read."""

    def __init__(self, size: int, *, noise: float = 0.1) -> None:
        self.points, self.at, self.read = Points(size, noise=noise), 0, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.at < len(self.points):
            self.at, self.read = self.at + 1, self.read + 1
            yield self.points[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


def stateful_loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
        return StatefulDataLoader(Points(20, noise=0.1), batch_size=3, shuffle=True, generator=generator)


def epoch_end_at(step: int) -> Any:
    """Return a callback that ends the epoch in the middle."""

    def on_step_end(state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            control.should_epoch_stop = True

    return callback(on_step_end=on_step_end)


CASES: dict[str, dict[str, Any]] = {
    "a data set": {},
    "an iterable": {"data": lambda: Stream(20, noise=0.1), "max_steps": 9},
    "an iterable with a state": {"data": lambda: Counting(20), "max_steps": 9},
    "an iterable with a state that ends with a whole batch": {"data": lambda: Counting(18), "max_steps": 8},
    "a loader with a state": {"data": stateful_loader},
    "a loader without one": {"data": lambda: torch.utils.data.DataLoader(Points(20), batch_size=3, shuffle=True)},
    "an iterable that shuffles": {"data": lambda: Shuffled(20), "max_steps": 9},
    "saved after each epoch": {"save_strategy": "epoch"},
    "an epoch that a callback ends": {"callbacks": lambda: [epoch_end_at(6)]},
    "python's and numpy's generators": {"data": lambda: Drawing(20)},
}


class Drawing(Points):
    """Points augmented by Python's and NumPy's generators."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {**row, "x": row["x"] + random.gauss(0, 0.1) + float(np.random.normal(0, 0.1))}


class Shuffled(Stream):
    """Points in an order that Python's generator gives."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(random.sample(list(super().__iter__()), len(self.points)))


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def hard_run(folder: Path, resume: str | None = None, **changes: Any) -> Trainer:
    options: dict[str, Any] = {
        "model": Line(dropout=0.3),
        "data": lambda: Points(20, noise=0.1),
        "callbacks": list,
    } | changes
    options["data"], options["callbacks"] = options["data"](), options["callbacks"]()
    torch.manual_seed(hash(resume))  # a run must not depend on what the process has drawn before
    return run(folder, resume, **HARD | options)


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumed_after_any_step_is_the_same_to_the_bit(case: str, tmp_path: Path) -> None:
    whole = hard_run(tmp_path / "whole", **CASES[case])
    steps = steps_of(tmp_path / "whole")
    assert len(steps) >= 3
    for step in steps:
        again = hard_run(tmp_path / "again", str(tmp_path / "whole" / f"checkpoint-{step}"), **CASES[case])
        assert history(again) == history(whole), step
        for mine, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, other), step
        assert again.state.global_step == whole.state.global_step
        shutil.rmtree(tmp_path / "again", ignore_errors=True)


# Another test of this process may have imported JAX. Workers of a loader are forked, and do not use it.
@pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
@pytest.mark.parametrize("data", [lambda: Drawing(20), lambda: Counting(20, noise=0.0)])
def test_workers_continue_where_they_were(data: Any, tmp_path: Path) -> None:
    """Workers of a data set draw the same numbers.

    Those of an iterable have read ahead, and their state says how far.
    """
    options: dict[str, Any] = {"data": data, "dataloader_num_workers": 2, "max_steps": 4}
    whole = hard_run(tmp_path / "whole", **options)
    again = hard_run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-2"), **options)
    assert history(again) == history(whole)


def test_read_samples_are_not_read_again(tmp_path: Path) -> None:
    whole, rest = Counting(20), Counting(20)
    hard_run(tmp_path, data=lambda: whole, max_steps=3, num_train_epochs=1)
    hard_run(tmp_path, str(tmp_path / "checkpoint-2"), data=lambda: rest, max_steps=3, num_train_epochs=1)
    assert (whole.read, rest.read) == (18, 6)


def test_logs_left_by_a_crash_are_written_once(tmp_path: Path) -> None:
    """The first run logs after its last checkpoint, and dies. The log still has each step once."""

    def dies(state: Any, **_: Any) -> None:
        if state.global_step == 5:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"max_steps": 8, "save_steps": 3, "logging_steps": 1, "disable_tqdm": True}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=[JsonLogger(), callback(on_log=dies)], **options)
    made = run(tmp_path, True, callbacks=[JsonLogger()], **options)
    assert made.state.global_step == 8
    records = json.loads((tmp_path / "logs" / "trainer_logs.json").read_text())
    assert [each["global_step"] for each in records if "loss" in each] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [each["loss"] for each in records if "loss" in each] == losses(made)


def test_a_stop_is_saved_and_the_run_resumes_from_there(tmp_path: Path) -> None:
    def stops(state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            control.stop()

    whole = run(tmp_path / "whole", max_steps=7, logging_steps=1)
    run(tmp_path / "stopped", callbacks=[callback(on_step_end=stops)], max_steps=7, logging_steps=1, save_steps=100)
    assert steps_of(tmp_path / "stopped") == [4]
    assert history(run(tmp_path / "stopped", True, max_steps=7, logging_steps=1)) == history(whole)


def test_a_run_can_be_made_longer(tmp_path: Path) -> None:
    short = run(tmp_path, max_steps=3, lr_scheduler_type="constant", logging_steps=1)
    longer = run(tmp_path, True, max_steps=6, lr_scheduler_type="constant", logging_steps=1)
    assert losses(longer)[:3] == losses(short)
    assert longer.state.global_step == longer.state.max_steps == 6


def test_true_needs_a_checkpoint_and_auto_does_not(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="resume_from_checkpoint=True: no checkpoint in .*resume_from_checkpoint='auto'"
    ):
        run(tmp_path, True, max_steps=1)
    assert run(tmp_path, "auto", max_steps=2).state.global_step == 2
    assert run(tmp_path, "auto", max_steps=3).state.global_step == 3
    assert run(tmp_path, None, max_steps=4, resume_from_checkpoint=tmp_path / "checkpoint-3").state.global_step == 4
    with pytest.raises(CheckpointError, match="checkpoint-9: no checkpoint is there"):
        run(tmp_path, str(tmp_path / "checkpoint-9"), max_steps=4)


def test_a_resume_leaves_out_the_skipped_components(tmp_path: Path) -> None:
    run(tmp_path / "first", max_steps=6, save_steps=3, learning_rate=0.1)
    made = trainer(tmp_path / "second", max_steps=6, save_strategy="no", learning_rate=0.01, callbacks=[
        callback(on_train_begin=lambda optimizer, state, **_: seen.append((len(optimizer.state), state.global_step)))
    ])  # fmt: skip
    seen: list[tuple[int, int]] = []
    made.load_checkpoint(str(tmp_path / "first" / "checkpoint-3"), skip=["optimizer", "scheduler"])
    assert isinstance(made.model, Line)
    loaded = made.model.a.item()
    assert loaded != 0.0  # the model is there before training begins
    made.train()
    assert seen == [(0, 3)]
    assert made.state.global_step == 6
    made.train()
    assert seen[1] == (2, 0)  # once: what was loaded is used up


def test_a_new_run_begins_with_only_the_weights_of_another(tmp_path: Path) -> None:
    first = run(tmp_path, max_steps=4, save_steps=4)
    made = trainer(tmp_path, max_steps=2, save_strategy="no", learning_rate=0.0)
    made.load_checkpoint(True, only=["model"])
    made.train()
    assert made.state.global_step == 2
    assert [each.item() for each in made.model.parameters()] == [each.item() for each in first.model.parameters()]


def test_missing_components_of_a_checkpoint_are_warned_about_if_not_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, max_steps=4, save_steps=4, save_only_model=True)
    strict, lenient = trainer(tmp_path, max_steps=2, save_strategy="no"), trainer(tmp_path, max_steps=2)
    strict.load_checkpoint(True)
    with pytest.raises(CheckpointError, match="set strict=False to continue without it"):
        strict.train()
    lenient.load_checkpoint(True, strict=False)
    lenient.train()
    assert lenient.state.global_step == 2
    assert "skipped optimizer" in caplog.text


def test_unknown_components_are_named(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2, save_steps=2)
    made = trainer(tmp_path, max_steps=4)
    made.load_checkpoint("auto", skip=["optimiser"])
    with pytest.raises(
        UsageError, match=r"skip=\['optimiser'\]: this run has no component 'optimiser'; use some of callb"
    ):
        made.train()
    with pytest.raises(UsageError, match=r"skip='optimizer': must be a list of keys; write skip=\['optimizer'\]"):
        made.load_checkpoint(True, skip="optimizer")
    with pytest.raises(UsageError, match="no checkpoint in"):
        trainer(tmp_path / "empty").load_checkpoint(True)
