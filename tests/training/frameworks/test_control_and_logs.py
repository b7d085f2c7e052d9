"""Job control and exact logs of resumed runs, under the Trainers of Hugging Face and Lightning."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyward.training import HFCallbacks, JsonLogger, LightningCallbacks, TrainerCallback, TrainerControlCallback
from skyward.training.control import find

from . import same_records
from .recording import Asks

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),  # Lightning calls deprecated functions
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


def with_hf(folder: Path, callbacks: list[Any], *, epochs: int, resume: bool = False) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    given: dict[str, Any] = {**same_records.ARGUMENTS, "num_train_epochs": epochs, "logging_steps": 2}
    given |= {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 10**6}
    made = Trainer(
        same_records.Line(),
        TrainingArguments(output_dir=str(folder), report_to=[], **given),
        train_dataset=same_records.rows(),
        callbacks=[HFCallbacks(callbacks)],
    )
    made.remove_callback(PrinterCallback)
    made.train(resume_from_checkpoint=resume)


def with_lightning(folder: Path, callbacks: list[Any], *, epochs: int, resume: bool = False) -> None:
    made = same_records.lightning_trainer(folder, LightningCallbacks(callbacks, logging_steps=2), epochs=epochs)
    checkpoint = str(max(folder.glob("*.ckpt"), key=os.path.getmtime)) if resume else None
    made.fit(same_records.lightning_module(0.1), same_records.loader(), ckpt_path=checkpoint)


TRAINERS = [pytest.param(with_hf, id="hf"), pytest.param(with_lightning, id="lightning")]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(each.name.split("-")[1].split(".")[0]) for each in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("train", TRAINERS)
def test_a_run_is_saved_and_stopped_from_outside(
    train: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    has_begun, has_asked, said = threading.Event(), threading.Event(), []

    class Meets(TrainerCallback):
        def on_log(self, **_: Any) -> None:
            has_begun.set()

        def on_step_end(self, control: Any, **_: Any) -> None:
            if has_asked.is_set():  # and it has not ended: the test fails, it must not hang
                control.abort()

    def ask() -> None:
        try:
            has_begun.wait(60)
            client = find("run")
            said.append(client.save(wait_s=30))
            said.append(client.save_and_stop(wait_s=30))
        finally:
            has_asked.set()

    asking = threading.Thread(target=ask)
    asking.start()
    train(tmp_path / "run", [TrainerControlCallback("run", port=0, enable_http=True), Meets()], epochs=10**6)
    asking.join(60)
    assert [each.state for each in said] == ["executed", "executed"]
    first, last = saved_steps(tmp_path / "run")
    assert said[0].step == first
    assert said[1].step == last


# HF forgets the losses since its last log, and Lightning goes on exactly from the end of an epoch.
@pytest.mark.parametrize(("train", "saved"), [(with_hf, 6), (with_lightning, 5)], ids=["hf", "lightning"])
def test_logs_of_a_resumed_run_have_no_gaps_and_no_duplicates(
    train: Callable[..., None], saved: int, tmp_path: Path
) -> None:
    def records(folder: Path) -> tuple[list[int], list[float]]:
        found = json.loads((folder / "logs" / "trainer_logs.json").read_text())
        losses = [(each["global_step"], each["loss"]) for each in found if "loss" in each]
        return [step for step, _ in losses], [loss for _, loss in losses]

    train(tmp_path / "whole", [JsonLogger()], epochs=3)
    # It is saved, goes on to step 9, and is resumed from the save.
    asks = [Asks("on_step_end", saved, "should_save"), Asks("on_step_end", 9, "abort")]
    train(tmp_path / "parts", [*asks, JsonLogger()], epochs=3)
    assert saved_steps(tmp_path / "parts") == [saved]
    assert records(tmp_path / "parts")[0] == [2, 4, 6, 8]
    train(tmp_path / "parts", [JsonLogger()], epochs=3, resume=True)
    (steps, losses), (whole_steps, whole_losses) = records(tmp_path / "parts"), records(tmp_path / "whole")
    assert steps == whole_steps == [2, 4, 6, 8, 10, 12, 14]
    assert losses == pytest.approx(whole_losses, rel=1e-4)
