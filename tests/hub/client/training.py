"""Trainings that log to a hub, as processes: python -m tests.hub.client.training PART FOLDER.

Part `first` trains our Trainer until it is killed, after it said "ready" in step 10. Part `second` resumes it from its
last checkpoint, that of step 9. Part `steered` trains until it is told to stop. Part `keras` trains with Keras. The
hub is that of the environment.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # Keras does without
    gc.disable()  # until all is imported: it stays

from skyward import hub
from skyward.hub import HubLogger
from skyward.training import Trainer, TrainerCallback, TrainingArguments
from tests.training.frameworks import same_records


class WaitsForTheEnd(TrainerCallback):
    def on_step_begin(self, state: Any, **_: Any) -> None:
        if state.global_step == 10:
            run = hub.active_run()
            assert run is not None
            assert run.flush(60)
            os.write(1, b"ready\n")
            time.sleep(60)


class TakesItsTime(TrainerCallback):
    def on_step_begin(self, state: Any, **_: Any) -> None:
        time.sleep(0.05)


def train(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    """Train our Trainer for 12 steps: log at each second, evaluate at each fourth, save at each third."""
    given: dict[str, Any] = {
        **same_records.ARGUMENTS,
        "num_train_epochs": 3,
        "max_steps": 12,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 3,
        **options,
    }
    args = TrainingArguments(output_dir=folder, learning_rate=0.1, **given)
    rows = same_records.rows()
    made = Trainer(same_records.Line(), args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    made.train()
    return made


def with_keras(folder: Path) -> None:
    import keras

    from skyward.training import KerasCallbacks

    leave_imports_alone()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    ours = KerasCallbacks([HubLogger(run_name="keras")], output_dir=folder, logging_steps=1)
    x, y = same_records.X.numpy(), same_records.Y.numpy()
    model.fit(x, y, callbacks=[ours], verbose=0, validation_data=(x, y), batch_size=2, epochs=2, shuffle=False)


def train_rank(rank: int, meeting: str, folder: Path, answers: Any) -> None:
    """Train one of two ranks. This module imports no framework's callbacks, which takes three seconds for each rank."""
    import torch
    import torch.distributed as dist

    from skyward.training import DDPTrainer, DDPTrainingArguments

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    args = DDPTrainingArguments(
        output_dir=folder, max_steps=4, per_device_train_batch_size=2, logging_steps=1, use_cpu=True, save_steps=100
    )
    logger = HubLogger(run_name="two ranks")
    DDPTrainer(same_records.Line(), args, train_dataset=same_records.rows(), callbacks=[logger]).train()
    answers.put((rank, logger.run_id))
    dist.destroy_process_group()


def leave_imports_alone() -> None:
    """Look for garbage again, except among what was imported."""
    gc.enable()
    gc.freeze()


def main(part: str, folder: Path) -> None:
    if part == "keras":
        with_keras(folder)
        return
    leave_imports_alone()
    if part == "steered":
        logger = HubLogger(run_name="steered")
        train(folder, [logger, TakesItsTime()], max_steps=10_000, save_strategy="no", eval_strategy="no")
    elif part == "first":
        train(folder, [HubLogger(run_name="killed"), WaitsForTheEnd()])
    else:
        train(folder, [HubLogger(run_name="killed")], resume_from_checkpoint=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
