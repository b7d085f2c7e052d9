"""All loggers in real trainers: ours, killed and resumed; Hugging Face's, stopped and resumed; two ranks of gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.few_modules import LEAN
from tests.training.checkpoint.crew import WARM, warm_process
from tests.training.events import scalars_in, texts_in, without_tensorflow

without_tensorflow()

OF_TIME = ("runtime", "per_second", "tok_per_sec", "timestamp")


def records_in(folder: Path) -> list[dict[str, Any]]:
    """Return the records without times."""
    found = json.loads((folder / "trainer_logs.json").read_text())
    return [{key: value for key, value in each.items() if not key.endswith(OF_TIME)} for each in found]


def comparable_scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    return {tag: each for tag, each in scalars_in(folder).items() if tag not in {"tok-per-sec", "mfu"}}


def without_times(text: str) -> list[str]:
    """Return the shown lines without times."""
    return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", each) for each in text.splitlines()]


# Ours -----------------------------------------------------------------------------------------------------------------


class Part:
    def __init__(self, folder: Path, name: str) -> None:
        command = [sys.executable, "-m", "tests.training.resumed_run", str(folder), name]
        environment = {**os.environ, "PYTHONPATH": str(LEAN)}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def is_ready(self) -> bool:
        assert self.process.stdout is not None
        return self.process.stdout.readline() == "ready\n"

    def end(self) -> str:
        """Return the output of the run."""
        _, shown = self.process.communicate(timeout=100)
        return shown


def test_a_run_that_was_killed_and_resumed_has_the_logs_of_one_that_was_not(tmp_path: Path) -> None:
    whole_at, parts_at = tmp_path / "whole", tmp_path / "parts"
    whole, first = Part(whole_at, "whole"), Part(parts_at, "first")
    assert first.is_ready()
    first.process.kill()
    first.end()
    assert json.loads((parts_at / "logs/trainer_logs.json").read_text())[-1]["global_step"] == 10
    (events,) = (parts_at / "logs/tb").iterdir()
    with events.open("ab") as file:
        file.write(b"\x30\0\0\0\0\0\0\0half a record")  # as a kill in the middle of a write leaves it
    second = Part(parts_at, "second")
    shown_of_whole, shown = whole.end(), second.end()
    assert (whole.process.returncode, second.process.returncode) == (0, 0), shown

    assert not (parts_at / "other").exists()
    records = records_in(parts_at / "logs")
    assert records == records_in(whole_at / "logs")
    assert [each["global_step"] for each in records if "loss" in each] == [2, 4, 6, 8, 10, 12]
    assert [each["global_step"] for each in records if "eval_loss" in each] == [4, 8, 12]
    assert comparable_scalars_in(parts_at / "logs/tb") == comparable_scalars_in(whole_at / "logs/tb")
    assert list(texts_in(parts_at / "logs/tb")) == ["train_results", "training_info"]

    rows = [each for each in without_times(shown_of_whole) if each.strip()[:2].strip().isdecimal()]
    assert [int(each.split()[0]) for each in rows] == [2, 4, 4, 6, 8, 8, 10, 12, 12]
    assert "model:" in shown_of_whole
    assert "training has ended" in shown_of_whole
    assert re.search(r"resumed at step: +9\n", shown)


# Hugging Face's -------------------------------------------------------------------------------------------------------


def test_hugging_faces_trainer_stopped_and_resumed_has_the_logs_of_one_that_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Trainer, TrainingArguments

    from skyward.training import DefaultMetrics, InfoCallback, ProgressCallback, TrainerCallback
    from skyward.training.frameworks.hf.callbacks import HFCallbacks
    from tests.training.resumed_run import DATA, Line, loggers

    class StopsAt(TrainerCallback):
        def __init__(self, step: int | None) -> None:
            self.step = step

        def on_step_end(self, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.step:
                control.should_training_stop = True

    def train(folder: Path, *, resume: str | None = None, stop_at: int | None = None) -> None:
        given = {"per_device_train_batch_size": 2, "max_steps": 12, "learning_rate": 0.05, "seed": 1}
        cadence = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
        args = TrainingArguments(output_dir=str(folder / "out"), **given, **cadence, **quiet)
        ours = [DefaultMetrics(), *loggers(folder / "logs"), InfoCallback(True), ProgressCallback(), StopsAt(stop_at)]
        made = Trainer(
            model=Line(),
            args=args,
            train_dataset=DATA,
            eval_dataset=DATA[:4],
            callbacks=[HFCallbacks(ours, logging_dir=str(folder / "logs"))],
        )
        made.train(resume_from_checkpoint=resume)

    def records_of(part: str) -> list[dict[str, Any]]:
        """Return the records without train_loss: HF's counts the steps since the resume as if they were all."""
        return [
            {key: value for key, value in each.items() if key != "train_loss"}
            for each in records_in(tmp_path / part / "logs")
        ]

    train(tmp_path / "whole")
    shown = capsys.readouterr().out
    train(tmp_path / "parts", stop_at=11)
    train(tmp_path / "parts", resume=str(tmp_path / "parts/out/checkpoint-8"))
    assert records_of("parts") == records_of("whole")
    assert [each["global_step"] for each in records_of("parts") if "eval_loss" in each] == [4, 8, 12]
    found = comparable_scalars_in(tmp_path / "parts/logs/tb")
    assert found == comparable_scalars_in(tmp_path / "whole/logs/tb")
    assert [step for step, _ in found["eval-loss"]] == [4, 8, 12]
    assert shown.count("  eval_loss: ") == 3
    assert "args.learning_rate:" in shown


# Two ranks ------------------------------------------------------------------------------------------------------------

WORLD = 2


def _rank(rank: int, meeting: str, folder: Path, answers: Any) -> None:
    import contextlib
    import io
    import os

    import torch
    import torch.distributed as dist

    from skyward.training import DDPTrainer, DDPTrainingArguments, DivergenceDetector, TrainerCallback
    from tests.training.resumed_run import DATA, Line, loggers

    without_tensorflow()
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)

    class OtherLosses(TrainerCallback):
        """Loss that differs by rank, as if each rank logged its own: rank 1's is no number from step 4 on."""

        def on_log_step(self, logs: dict[str, Any], state: Any, **_: Any) -> None:
            if state.global_step >= 4 and rank == 1:
                logs["loss"] = float("nan")

    detectors: list[Any] = []
    for action in ("stop", "abort"):
        out = folder / action
        args = DDPTrainingArguments(
            output_dir=out, max_steps=8, per_device_train_batch_size=2, logging_steps=1, use_cpu=True, save_steps=100
        )
        callbacks = [OtherLosses(), *loggers(out / "logs")[:-1], DivergenceDetector(action=action)]
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            made = DDPTrainer(Line(), args, train_dataset=DATA, callbacks=callbacks)
            made.train()
        detectors.append((made.state.global_step, callbacks[-1].state_dict(), shown.getvalue()))
    answers.put((rank, detectors))
    dist.destroy_process_group()


def test_two_ranks_end_together_although_their_losses_differ_and_one_of_them_writes(tmp_path: Path) -> None:
    answers = WARM.Queue()
    meeting = f"file://{tmp_path}/meeting"
    ranks = [warm_process(_rank, rank, meeting, tmp_path, answers) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    told = dict(answers.get(timeout=100) for _ in range(WORLD))
    for process in ranks:
        process.join(60)

    for at, action in enumerate(("stop", "abort")):
        (step, state, shown), (other_step, other_state, other_shown) = told[0][at], told[1][at]
        assert step == other_step == 4
        assert state == other_state
        assert state["observation_count"] == 3
        assert "ranks:" in shown
        assert other_shown == ""
        out = tmp_path / action
        assert [each.name for each in out.glob("checkpoint-*")] == (["checkpoint-4"] if action == "stop" else [])
        losses = [each for each in records_in(out / "logs") if "loss" in each]
        assert [each["global_step"] for each in losses] == [1, 2, 3, 4]
        assert [step for step, _ in scalars_in(out / "logs/tb")["train-loss"]] == [1, 2, 3, 4]
