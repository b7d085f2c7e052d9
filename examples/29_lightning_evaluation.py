"""Train with Lightning; the module's own validation runs in another process meanwhile.

python examples/29_lightning_evaluation.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from skyward.training.sakura import SakuraTrainer


class Digits(LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()  # so that a worker can make one like it
        self.network = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: Any) -> Any:
        images, digits = batch
        return cross_entropy(self.network(images), digits)

    def validation_step(self, batch: Any) -> None:
        images, digits = batch
        outputs = self.network(images)
        self.log("val_loss", cross_entropy(outputs, digits))
        self.accuracy(outputs, digits)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def data() -> tuple[TensorDataset, TensorDataset]:
    x, y = load_digits(return_X_y=True)
    images, digits = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return TensorDataset(images[:1400], digits[:1400]), TensorDataset(images[1400:], digits[1400:])


def validation_data() -> DataLoader[Any]:
    """Called on the worker, so that nothing of it has to travel."""
    return DataLoader(data()[1], batch_size=100)


def main() -> None:
    seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        saves = ModelCheckpoint(folder, monitor="val_accuracy", mode="max", filename="{epoch}-{val_accuracy:.3f}")
        stops = EarlyStopping("val_loss", patience=5, min_delta=0.005)
        trainer = SakuraTrainer(
            val_compute="subprocess",  # or a pool, a node or a role of one; None: a thread of this process
            val_loader_factory=validation_data,
            model_path=Path(folder, "best.pt"),  # the weights with the best val_loss that was scored
            gate="always",
            timeout_s=120,
            # All others are Lightning's.
            max_epochs=12,
            callbacks=[stops, saves],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = trainer.run(Digits(width=32), DataLoader(data()[0], batch_size=32, shuffle=True))

        print(f"{len(trainer.history)} validations, by {trainer.history[-1]['worker_name']}")
        best = min(trainer.history, key=lambda row: row["val_loss"])
        print(f"best val_loss: {trainer.best_val_loss:.3f}, of epoch {best['epoch']}")
        model.load_state_dict(torch.load(Path(folder, "best.pt"), weights_only=True))
        images, digits = data()[1].tensors
        print(f"scored here again: {cross_entropy(model.network(images), digits):.3f}")
        print("checkpoint:", Path(saves.best_model_path).name)


if __name__ == "__main__":
    main()
