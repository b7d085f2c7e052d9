"""One tiny run under each of four producers, with the same callbacks. As a script, it runs Keras's and prints JSON."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # Keras does without

import torch

from skyward.training import (
    DefaultMetrics,
    DivergenceDetector,
    InfoCallback,
    JsonLogger,
    ProgressCallback,
    WeightNormLogger,
)

ROWS, BATCH, EPOCHS = 10, 2, 2
X = (torch.arange(float(ROWS)) / ROWS)[:, None]
Y = 2 * X


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}


def callbacks() -> list[Any]:
    shown = io.StringIO()
    return [
        DefaultMetrics(),
        WeightNormLogger(),
        DivergenceDetector(smoothing=1.0, threshold=100.0, patience=1, warmup=0),
        JsonLogger(),
        ProgressCallback(use_tqdm=False, output_stream=shown),
        InfoCallback(output_stream=shown),
    ]


def rows() -> list[Any]:
    return [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]


ARGUMENTS: dict[str, Any] = {
    "num_train_epochs": EPOCHS,
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": BATCH,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def with_our_trainer(folder: Path, rate: float) -> None:
    from skyward.training import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=folder, learning_rate=rate, **ARGUMENTS)
    Trainer(Line(), args, train_dataset=rows(), eval_dataset=rows(), callbacks=callbacks()).train()


def with_hf(folder: Path, rate: float) -> None:
    from transformers import Trainer, TrainingArguments

    from skyward.training import HFCallbacks

    args = TrainingArguments(output_dir=str(folder), learning_rate=rate, report_to=[], **ARGUMENTS)
    given: Any = {"train_dataset": rows(), "eval_dataset": rows()}
    Trainer(Line(), args, callbacks=[HFCallbacks(callbacks())], **given).train()


def loader() -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(X, Y), batch_size=BATCH)


def lightning_module(rate: float) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]  # it is Any to mypy here
        def __init__(self) -> None:
            super().__init__()
            self.line = Line()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.line(*batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.line(*batch)["loss"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=rate)

    return Module()


def lightning_trainer(folder: Path, callback: Any, *, epochs: int) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def with_lightning(folder: Path, rate: float) -> None:
    from skyward.training import LightningCallbacks

    made = lightning_trainer(folder, LightningCallbacks(callbacks(), logging_steps=1), epochs=EPOCHS)
    made.fit(lightning_module(rate), loader(), loader())


def with_keras(folder: Path, rate: float) -> None:
    import keras

    from skyward.training import KerasCallbacks

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    ours = KerasCallbacks(callbacks(), output_dir=folder, logging_steps=1)
    data: dict[str, Any] = {"validation_data": (X, Y), "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
    model.fit(X, Y, callbacks=[ours], verbose=0, **data)


def records(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "logs" / "trainer_logs.json").read_text())
    return found


def main() -> None:
    found = {}
    for name, rate in (("tame", 0.1), ("wild", 20.0)):
        with tempfile.TemporaryDirectory() as folder:
            with_keras(Path(folder), rate)
            found[name] = {"records": records(Path(folder)), "files": sorted(e.name for e in Path(folder).iterdir())}
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
