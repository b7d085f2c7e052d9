"""Four ranks as 2 x 2: two copies of a pipeline of two stages. One rank dies; the run goes on, to the bit.

python examples/31_hybrid_parallelism.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import skyward as sky
from skyward.training import PipelineTrainer, TrainerCallback, TrainingArguments


def network() -> nn.Sequential:
    """Digits (B, 64) float32 to logits (B, 10)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def halves(model: nn.Module, num_stages: int) -> list[nn.Module]:
    """The first stage gives hidden (B, 64), the second takes it."""
    assert isinstance(model, nn.Sequential)
    assert num_stages == 2
    return [model[:3], model[3:]]


def digits() -> list[Any]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    return list(torch.utils.data.random_split(data, [1397, 400], torch.Generator().manual_seed(0)))


class Dies(TrainerCallback):
    """Kills its process at a step of the first start. Remembers where this start began."""

    began_after = 0

    def __init__(self, step: int | None, *, is_victim: bool) -> None:
        self._step = step if is_victim else None

    def on_train_begin(self, state: Any, **_: Any) -> None:
        self.began_after = state.global_step

    def on_step_end(self, state: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


@sky.compute(max_restarts=1)
@sky.integrations.torch(backend="gloo", processes_per_node=2)
@sky.stdout(only="head")
def train(folder: Path, dies_at: int | None) -> tuple[int, list[float], float, int]:
    info = sky.instance_info()
    assert info is not None
    train_data, test_data = digits() if info.rank == 0 else (None, None)  # rank 0 reads for all
    dies = Dies(dies_at, is_victim=info.rank == 3 and info.restart_count == 0)
    trainer = PipelineTrainer(
        network(),
        TrainingArguments(
            folder,
            max_steps=60,
            per_device_train_batch_size=32,  # of each copy of the pipeline
            learning_rate=5e-3,
            logging_steps=10,
            save_steps=10,
            async_save=True,
            resume_from_checkpoint="auto",
            use_cpu=True,  # gloo passes no CUDA tensors between stages
        ),
        model_splitter=halves,
        num_stages=2,  # so four ranks are two copies: 0 and 1, 2 and 3
        compute_loss_func=nn.functional.cross_entropy,
        compute_metrics=lambda told: {"accuracy": float((told.predictions.argmax(-1) == told.label_ids).mean())},
        train_dataset=train_data,
        eval_dataset=test_data,
        callbacks=[dies],
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model(folder / "whole")  # both stages, in one file
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return dies.began_after, losses, accuracy, sum(each.numel() for each in trainer.model.parameters())


def main() -> None:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder, sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        (_, expected, accuracy, own), _ = train(Path(folder, "whole-run"), dies_at=None) @ pool
        (began, losses, _, _), _ = train(Path(folder, "killed"), dies_at=45) @ pool
        print(f"rank 3 died at step 45; all went on after step {began}, with the same losses: {losses == expected}")
        names = sorted(each.name for each in Path(folder, "killed", "checkpoint-60").glob("model*"))
        print("each stage is written once:", *names, sep="\n  ")
        model = network()
        model.load_state_dict(load_file(Path(folder, "killed", "whole", "model.safetensors")))
        total = sum(each.numel() for each in model.parameters())
        print(f"a rank of the first stage held {own:,} of {total:,} parameters; test accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
