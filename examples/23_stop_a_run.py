"""Look at a training on two nodes while it runs, save it, and stop it from another terminal.

python examples/23_stop_a_run.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import skyward as sky

NAME = f"digits-{os.getpid()}"


@sky.compute
@sky.integrations.torch(backend="gloo", seed=0)
def train(folder: Path, steps: int) -> tuple[int, list[str]]:
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset

    from skyward.training import DDPTrainer, DDPTrainingArguments, TrainerControlCallback

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.layers(x)
            return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}

    def batch(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}

    x, y = load_digits(return_X_y=True)
    trainer = DDPTrainer(
        Network(),
        DDPTrainingArguments(
            output_dir=folder,
            max_steps=steps,
            logging_steps=20,
            save_steps=steps,  # none is due before the end
            learning_rate=1e-3,
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)),
        data_collator=batch,
        # In a call of a pool no port is opened unless one is asked for; the commands of `skyward train` need one.
        callbacks=[TrainerControlCallback(job_id=NAME, enable_http=True)],
    )
    trainer.train()
    return trainer.state.global_step, sorted(path.name for path in folder.glob("checkpoint-*"))


def skyward(*line: str) -> None:
    """What would be typed in another terminal."""
    print(f"$ skyward {' '.join(line)}", flush=True)
    subprocess.run([sys.executable, "-m", "skyward", *line], check=True)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        sky.ComputePool(provider=sky.Local(), nodes=2, logs=False) as pool,
        ThreadPoolExecutor() as threads,
    ):
        call = train(Path(folder), steps=1_000_000)
        training = threads.submit(lambda: call @ pool)

        run = pool.control(call)  # by the channel of the pool: no port, on any provider
        while run.status().global_step < 50:
            time.sleep(0.1)
        status = run.status()
        print(f"step {status.global_step} of {status.max_steps}, on {status.world_size} ranks", flush=True)
        saved = run.save(wait_s=30)
        print(f"saved at step {saved.step}: {saved.state}", flush=True)

        skyward("train", "status", NAME)
        skyward("train", "save-stop", NAME, "--wait", "30")
        (first, checkpoints), (second, _) = training.result()
        print(f"rank 0 ended at step {first}, rank 1 at the same: {first == second}")
        print(f"{len(checkpoints)} checkpoints, the last of step {first}: {f'checkpoint-{first}' in checkpoints}")


if __name__ == "__main__":
    main()
