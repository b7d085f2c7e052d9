"""Functions that the tests submit. They are in a module of the test's, which has to travel to the hub.

Each process of a job imports it, so it imports neither pytest nor the hub.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import skyward as sky

LINE, GIB = 1 << 20, 1 << 30


@sky.compute
def add(first: int, second: int) -> int:
    print(f"adding {first} and {second}", flush=True)
    return first + second


@sky.compute
def print_json() -> None:
    print(json.dumps({"loss": 0.5}, indent=4))


@sky.compute
def write_here(name: str, text: str) -> int:
    """Write a file into the working folder."""
    return Path(name).write_text(text)


class OwnError(Exception):
    """Class of a module that neither hub nor runner imports."""


@sky.compute
def fail(text: str) -> None:
    raise OwnError(text)


@sky.compute
def node() -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


@sky.compute
def wait_for(file: str, is_silent: bool = False) -> str:
    """Note each run in the file beside `file`, and return the text of `file` once it is there."""
    path = Path(file)
    with path.with_suffix(".runs").open("a") as runs:
        runs.write(f"{os.getpid()}\n")
    if not is_silent:
        print("begins", flush=True)
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if not is_silent:
        print("ends", flush=True)
    return path.read_text()


def runs_of(file: Path) -> list[int]:
    """Return the processes that ran `wait_for(file)`."""
    path = file.with_suffix(".runs")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@sky.compute
def train(folder: str, steps: int, marker: str, pause_s: float, gate: str = "") -> tuple[int, list[float]]:
    """Train a small network, from its last checkpoint on. Return the last step and the weights.

    Its process is in the file beside `marker`. With a `gate`, no save ends before that file is there. Another file
    beside `marker`, with the suffix `.hurry`, ends the pauses.
    """
    import torch
    from torch.utils.data import TensorDataset

    from skyward.training import DDPTrainer, DDPTrainingArguments, TrainerCallback, TrainerControlCallback

    class Pace(TrainerCallback):
        def on_step_end(self, state: Any, control: Any, **_: Any) -> None:
            Path(marker).write_text(str(state.global_step))
            if not Path(marker).with_suffix(".hurry").exists():
                time.sleep(pause_s)

        def on_save(self, *_: Any, **__: Any) -> None:
            deadline = time.monotonic() + 120
            while gate and not Path(gate).exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.layer(x)[:, 0]
            return {"loss": torch.nn.functional.mse_loss(scores, labels), "logits": scores}

    Path(marker).with_suffix(".pid").write_text(str(os.getpid()))
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    trainer = DDPTrainer(
        Network(),
        DDPTrainingArguments(
            output_dir=os.environ.get("SKYWARD_CHECKPOINT_DIR", folder),
            max_steps=steps,
            logging_steps=steps,
            save_steps=steps,
            learning_rate=1e-2,
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=TensorDataset(x, x.sum(1)),
        data_collator=lambda rows: {
            "x": torch.stack([row for row, _ in rows]),
            "labels": torch.stack([label for _, label in rows]),
        },
        callbacks=[Pace(), TrainerControlCallback()],
    )
    trainer.train(resume_from_checkpoint="auto")
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    return trainer.state.global_step, weights.tolist()


@sky.compute
def lose_answer(file: str, is_asked_again: bool) -> str:
    """Be a training that takes the order to save and end, whose answer is lost. Run again, go on to the end.

    It ends at once, or only when it is asked again because its answer did not come in time.
    """
    import threading

    from skyward.node.slot import answers
    from skyward.training.control.channel import answer_here
    from skyward.training.control.commands import ControlledRun

    if Path(file).exists():
        return "whole"
    assert answer_here(ControlledRun("half"))
    handler = answers.handler_here()
    assert handler is not None
    order, may_end = threading.Event(), threading.Event()

    def lossy(question: bytes, reply: answers.Reply) -> None:
        if order.is_set():
            may_end.set()  # and its answer is lost too
        elif b"save_and_stop" in question:
            order.set()
            if not is_asked_again:
                may_end.set()
        else:
            handler(question, reply)

    answers.serve(lossy)
    Path(file).touch()
    assert may_end.wait(120)
    return "half"


@sky.compute
def devices(file: str) -> str:
    """Return the variable by which this process sees GPUs, once `file` is there."""
    deadline = time.monotonic() + 60
    while not Path(file).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return os.environ["CUDA_VISIBLE_DEVICES"]


@sky.compute
def place(fails: bool = False) -> tuple[int, int, str]:
    """Return this process, the calls that it has run, and the folder of this job's checkpoints."""
    global _calls
    _calls += 1
    print(f"call {_calls}", flush=True)
    if fails:
        raise OwnError("on purpose")
    return os.getpid(), _calls, os.environ["SKYWARD_CHECKPOINT_DIR"]


_calls = 0


@sky.compute
def half(number: int) -> int:
    return number // 2


@sky.compute
def save_when_told(file: str) -> int:
    """Save step 1, note the run beside `file`, and save step 2 once the file of this attempt is there."""
    import torch

    from skyward.training.checkpoint import CheckpointCoordinator, components_of

    components = components_of(torch.nn.Linear(2, 1))
    coordinator = CheckpointCoordinator(components, output_dir=os.environ["SKYWARD_CHECKPOINT_DIR"])
    last = coordinator.latest()
    attempt = os.environ["SKYWARD_CHECKPOINT_WRITER"].rpartition(":")[2]
    if last is None:
        coordinator.save_checkpoint(checkpoint_id=1)
    path = Path(file)
    with path.with_suffix(".runs").open("a") as runs:
        runs.write(f"{os.getpid()}\n")
    deadline = time.monotonic() + 120
    while not path.with_suffix(f".{attempt}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    try:
        coordinator.save_checkpoint(checkpoint_id=2)
    except sky.errors.CheckpointSuperseded as error:
        written = path.with_suffix(".written")
        written.write_text(str(error))
        written.rename(path)  # whoever waits for the file finds all of it
        raise
    return int(attempt)


@sky.compute
def crash() -> None:
    os._exit(3)


@sky.compute
def flood(end: str) -> int:
    """Write 1 GiB in lines of 1 MiB, then on until the file `end` is there, and 32 more. Return their number.

    It takes no notice of how many arrive: a node drops lines that come faster than they are read.
    """
    text, lines, left = "x" * (LINE - 1), 0, 32
    deadline = time.monotonic() + 200
    while left:
        assert time.monotonic() < deadline
        left -= lines >= GIB // LINE and Path(end).exists()
        print(text)
        lines += 1
        time.sleep(0.005)
    return lines


@sky.compute
def count_up(gate: str, count: int, fails: bool = False) -> Iterator[tuple[int, int]]:
    """Yield the attempt and a number, each once the file `gate` is longer than the number. Then fail if told to."""
    attempt = int(os.environ["SKYWARD_CHECKPOINT_WRITER"].rpartition(":")[2])
    path = Path(gate)
    deadline = time.monotonic() + 120
    for number in range(count):
        while not (path.exists() and path.stat().st_size > number):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield attempt, number
    if fails:
        raise OwnError("after its items")


@sky.compute
def large(size: int) -> bytes:
    return bytes(size)
