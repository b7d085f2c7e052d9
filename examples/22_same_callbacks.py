"""The same callbacks, one of them our own, in the training loops of Hugging Face, Lightning and Keras.

python examples/22_same_callbacks.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import skyward as sky
from skyward.training import DivergenceDetector, JsonLogger, TrainerCallback


class GoodEnough(TrainerCallback):
    """Ends a run at the first evaluation with a loss below 0.5."""

    def on_evaluate(self, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        print(f"step {state.global_step}: {metrics['eval_loss']:.2f}", flush=True)
        if metrics["eval_loss"] < 0.5:
            control.should_training_stop = True  # a checkpoint is saved first, in all of them


def callbacks() -> list[TrainerCallback]:
    return [GoodEnough(), DivergenceDetector(threshold=2.0), JsonLogger()]


def digits() -> Any:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    return train_test_split((x / 16).astype("float32"), y, random_state=0)


def torch_model_and_data() -> tuple[Any, dict[str, Any]]:
    import torch

    class Classifier(torch.nn.Sequential):
        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": torch.nn.functional.cross_entropy(super().forward(x), labels)}

    x_train, x_test, y_train, y_test = digits()
    parts = {"train_dataset": zip(x_train, y_train, strict=True), "eval_dataset": zip(x_test, y_test, strict=True)}
    rows = {name: [{"x": x, "labels": y} for x, y in part] for name, part in parts.items()}
    return Classifier(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)), rows


@sky.compute
def with_transformers(folder: str) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model, data = torch_model_and_data()
    args = TrainingArguments(folder, num_train_epochs=20, per_device_train_batch_size=32, learning_rate=5e-3,
               logging_steps=20, eval_strategy="epoch", disable_tqdm=True, dataloader_pin_memory=False)  # fmt: skip
    trainer = Trainer(model, args, **data, callbacks=[sky.training.HFCallbacks(callbacks())])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


@sky.compute
def with_lightning(folder: str) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import AdamW
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def training_step(self, batch: Any) -> Any:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any) -> None:
            self.log("val_loss", self.model(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=5e-3)

    module = Module()
    module.model, data = torch_model_and_data()
    train, test = (DataLoader(each, batch_size=32, shuffle=name.startswith("train")) for name, each in data.items())
    ours = sky.training.LightningCallbacks(callbacks(), logging_steps=20)
    trainer = Trainer(default_root_dir=folder, max_epochs=20, callbacks=[ours], accelerator="cpu", logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(module, train, test)


@sky.compute
def with_keras(folder: str) -> None:
    import keras

    x_train, x_test, y_train, y_test = digits()
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    model.compile(keras.optimizers.AdamW(5e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ours = sky.training.KerasCallbacks(callbacks(), output_dir=folder, logging_steps=20)
    model.fit(x_train, y_train, 32, epochs=20, validation_data=(x_test, y_test), callbacks=[ours], verbose=0)


def main() -> None:
    pool = sky.ComputePool(provider=sky.Local(), image=sky.Image(env={"KERAS_BACKEND": "jax"}))
    with tempfile.TemporaryDirectory() as folder, pool:
        for train in (with_transformers, with_lightning, with_keras):
            train(str(place := Path(folder, train.__name__))) >> pool
            records = json.loads((place / "logs/trainer_logs.json").read_text())
            losses = [f"{each['loss']:.2f}" for each in records if "loss" in each]
            print(f"{train.__name__}: {losses[0]} to {losses[-1]}, saved {max(place.glob('checkpoint-*')).name}")


if __name__ == "__main__":
    main()
