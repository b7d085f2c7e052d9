"""A training with all loggers that is killed and resumed: python -m tests.training.resumed_run FOLDER PART.

Part `whole` trains 12 steps, logs at each second, evaluates at each fourth and saves at each third. Part `first` prints
"ready" after the events of step 10 and waits to be killed. Part `second` resumes from the last checkpoint, that of step
9, in the middle of an interval, with loggers for another folder.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # until all is imported: it stays

import torch

from skyward.training import (
    DivergenceDetector,
    InfoCallback,
    JsonLogger,
    ProgressCallback,
    ResumableSummaryWriter,
    TBLogger,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from tests.training.events import without_tensorflow

__all__ = ["DATA", "Line", "loggers"]

DATA = [{"x": torch.tensor([at / 10]), "labels": torch.tensor([at / 5 + (at % 3) / 10])} for at in range(40)]


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.a * x - labels) ** 2).mean(), "logits": self.a * x}


class WaitsForTheEnd(TrainerCallback):
    def on_step_begin(self, state: Any, **_: Any) -> None:
        if state.global_step == 10:
            os.write(1, b"ready\n")
            time.sleep(60)


def loggers(folder: Path) -> list[Any]:
    """Return all our loggers that are not there by default. Logs are in `folder`."""
    writer = ResumableSummaryWriter(folder / "tb")
    return [JsonLogger(name="a run"), writer, TBLogger(writer), DivergenceDetector()]


def main(folder: Path, part: str) -> None:
    without_tensorflow()
    torch.set_num_threads(1)
    logs = folder / ("logs" if part != "second" else "other")
    args = TrainingArguments(
        output_dir=folder / "out",
        logging_dir=logs,
        max_steps=12,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=3,
        resume_from_checkpoint=True if part == "second" else None,
        use_cpu=True,
    )
    callbacks = [*loggers(logs), InfoCallback(output_stream="stderr"), ProgressCallback(output_stream="stderr")]
    if part == "first":
        callbacks.append(WaitsForTheEnd())
    Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA[:4], callbacks=callbacks).train()


if __name__ == "__main__":
    gc.enable()
    gc.freeze()
    main(Path(sys.argv[1]), sys.argv[2])
