"""Record trainings of scikit-learn, Hugging Face, Lightning and Keras in one hub.

python examples/34_hub_frameworks.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from skyward import hub
from skyward.hub import HubLogger
from skyward.testing.hub import HubServer
from skyward.training import HFCallbacks, KerasCallbacks, LightningCallbacks

EPOCHS = 4


def digits() -> Any:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    return train_test_split((x / 16).astype("float32"), y, random_state=0)


def torch_model_and_rows() -> tuple[Any, Any, Any]:
    import torch

    class Classifier(torch.nn.Sequential):
        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": torch.nn.functional.cross_entropy(super().forward(x), labels)}

    x_train, x_test, y_train, y_test = digits()
    train, test = (
        [{"x": x, "labels": y} for x, y in zip(*part, strict=True)] for part in ((x_train, y_train), (x_test, y_test))
    )
    return Classifier(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)), train, test


def with_sklearn() -> None:
    from sklearn.linear_model import LogisticRegression

    x_train, x_test, y_train, y_test = digits()
    with hub.start_run("scikit-learn") as run:
        model = LogisticRegression(C=0.5, max_iter=300)
        run.log_params({"C": model.C, "solver": model.solver})
        model.fit(x_train, y_train)
        run.log_metrics({"eval_accuracy": model.score(x_test, y_test)})


def with_transformers(folder: str) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model, train, test = torch_model_and_rows()
    arguments = TrainingArguments(folder, num_train_epochs=EPOCHS, per_device_train_batch_size=32, learning_rate=5e-3,
                    logging_steps=20, eval_strategy="epoch", save_strategy="no", report_to="none", disable_tqdm=True,
                    use_cpu=True, dataloader_pin_memory=False)  # fmt: skip
    callback = HFCallbacks([HubLogger("Hugging Face")])
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def with_lightning(folder: str) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import AdamW
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def training_step(self, batch: Any) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=5e-3)

    module = Module()
    module.model, train, _ = torch_model_and_rows()
    callback = LightningCallbacks([HubLogger("Lightning")], logging_steps=20)
    trainer = Trainer(default_root_dir=folder, max_epochs=EPOCHS, callbacks=[callback], accelerator="cpu", logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True))


def with_keras(folder: str) -> None:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    x_train, x_test, y_train, y_test = digits()
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    model.compile(keras.optimizers.AdamW(5e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = KerasCallbacks([HubLogger("Keras")], output_dir=folder, logging_steps=20)
    model.fit(x_train, y_train, 32, EPOCHS, verbose=0, validation_data=(x_test, y_test), callbacks=[callback])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, HubServer(Path(folder) / "hub") as server:
        hub.connect(server.url, token=server.token, spool=Path(folder) / "spool")
        hub.set_experiment("digits")
        with_sklearn()
        for train in (with_transformers, with_lightning, with_keras):
            train(folder)
        for run in hub.runs(order_by="attributes.start_time ASC"):
            print(f"{run.name}: {run.status}, {', '.join(sorted(run.metrics)[:3])}")


if __name__ == "__main__":
    main()
