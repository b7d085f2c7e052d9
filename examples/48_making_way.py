"""Train on a machine that others may take: the training makes way for an urgent job, and goes on where it stopped.

python examples/48_making_way.py
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import skyward as sky
from skyward import hub
from skyward.testing.hub import HubServer

STEPS = 80


@sky.compute
@sky.integrations.torch(backend="gloo", seed=0)
def train(steps: int, pause_s: float) -> tuple[str, float]:
    """Train on digits from the last checkpoint on. Return the id of the run, and the loss over all images."""
    import torch
    from sklearn.datasets import load_digits

    from skyward.training import DDPTrainer, DDPTrainingArguments, TrainerCallback, TrainerControlCallback, TrainerState

    folder = os.environ["SKYWARD_CHECKPOINT_DIR"]  # the attempts of the job share it
    resumes = bool(os.listdir(folder))

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x.float() / 16), labels)}

    class Steps(TrainerCallback):
        def on_log(self, args: object, state: TrainerState, logs: Mapping[str, float], **_: object) -> None:
            if state.global_step % 20 == 0 and "loss" in logs:
                print(f"step {state.global_step}  loss {logs['loss']:.4f}", flush=True)

        def on_step_end(self, args: object, state: TrainerState, **_: object) -> None:
            time.sleep(pause_s if state.global_step >= 20 and not resumes else 0)  # an urgent job comes in time

    x, y = map(torch.tensor, load_digits(return_X_y=True))
    network = Network()
    trainer = DDPTrainer(
        network,
        DDPTrainingArguments(folder, max_steps=steps, logging_steps=1, learning_rate=1e-2, use_cpu=True),
        train_dataset=[{"x": row, "labels": label} for row, label in zip(x, y, strict=True)],
        callbacks=[Steps(), logger := hub.HubLogger("digits"), TrainerControlCallback()],  # the last one obeys the hub
    )
    trainer.train(resume_from_checkpoint="auto")
    return str(logger.run_id), network(x, y)["loss"].item()


def show(say: Callable[[str], None]) -> bool:
    """Let a training make way, and return whether it ended like one that ran in one piece."""
    training = hub.submit(train(STEPS, 0.5), name="training", labels=["spot"], priority="low", preemptible=True)
    whole = hub.submit(train(STEPS, 0.0), name="without interruption", labels=["desk"])
    urgent = None
    for line in training.logs():
        if line.startswith(("resumed", "step ")):  # the rest is the table of the trainer
            say(f"   training | {line}")
        if urgent is None and line.startswith("step 20"):
            urgent = hub.submit(sky.compute(lambda: "done at once")(), name="urgent", labels=["spot"], priority="high")
            say("an urgent job wants the machine; the training saves and makes way")
            say(f"   urgent   | {urgent.result(120)}")
    (run_id, loss), (_, whole_loss) = training.result(120), whole.result(120)
    ends = [attempt.end for attempt in training.attempts]
    has_no_seam = list(hub.run(run_id).history("loss").steps) == list(range(1, STEPS + 1))
    say(f"attempts: {', '.join(ends)}; the curve of both has {STEPS} steps, each of them once: {has_no_seam}")
    say(f"loss {loss!r}, without an interruption {whole_loss!r}: {'equal' if loss == whole_loss else 'DIFFERENT'}")
    return loss == whole_loss and has_no_seam and ends == ["stopped", "completed"]


@contextlib.contextmanager
def machines(server: HubServer, folder: Path) -> Iterator[None]:
    """Declare two machines, as one would in a terminal, and serve them. Here both are this one."""
    env = {**os.environ, "SKYWARD_HUB_URL": server.url, "SKYWARD_HUB_TOKEN": server.token}
    skyward = [sys.executable, "-m", "skyward"]
    for name in ("spot", "desk"):
        add = ["capacity", "add", name, "--provider", '{"type": "local"}', "--label", name]
        subprocess.run([*skyward, *add], env=env, check=True)
    with subprocess.Popen(
        [*skyward, "hub", "launcher", "--data", str(folder)], env=env, stderr=subprocess.DEVNULL
    ) as launcher:
        try:
            yield
        finally:
            launcher.terminate()


def main() -> None:
    with tempfile.TemporaryDirectory() as name, HubServer(Path(name, "hub")) as server:
        # A hub of your own outlives the script: run `skyward hub up` and paste the lines that it prints.
        hub.connect(server.url, token=server.token, spool=Path(name, "spool"))
        with machines(server, Path(name, "launcher")):
            assert show(print)


if __name__ == "__main__":
    main()
