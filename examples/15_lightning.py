"""Train a small network on scikit-learn's digits with Lightning, on two nodes.

python examples/15_lightning.py
"""

from __future__ import annotations

from typing import Any

import skyward as sky


def make_module(learning_rate: float) -> Any:
    import torch
    from lightning.pytorch import LightningModule
    from torch.nn.functional import cross_entropy

    class Digits(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

        def training_step(self, batch: Any) -> Any:
            inputs, labels = batch
            loss = cross_entropy(self.network(inputs), labels)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)  # the mean over all ranks
            return loss

        def validation_step(self, batch: Any) -> None:
            inputs, labels = batch
            hits = self.network(inputs).argmax(1) == labels
            self.log("accuracy", hits.float().mean(), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            measured = self.trainer.callback_metrics
            print(
                f"epoch {self.current_epoch + 1:2d}  loss {measured['loss']:.4f}  accuracy {measured['accuracy']:.3f}",
                flush=True,
            )

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=learning_rate)

    return Digits()


@sky.compute
@sky.integrations.lightning(backend="gloo", seed=0)
@sky.stdout(only="head")
@sky.stderr(only="head")
def train(epochs: int) -> dict[str, Any]:
    import torch
    from lightning.pytorch import Trainer
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch.utils.data import DataLoader, TensorDataset

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y), test_size=360, random_state=0)
    train_data, test_data = TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])

    # The number of nodes and of ranks on each are known; Lightning gives each rank its part of the data.
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loaders = DataLoader(train_data, batch_size=32, shuffle=True), DataLoader(test_data, batch_size=60)
    trainer.fit(make_module(learning_rate=3e-3), *loaders)
    accuracy = trainer.callback_metrics["accuracy"].item()
    return {"accuracy": accuracy, "ranks": trainer.world_size, "rank": trainer.global_rank}


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        # `@` is every node: one world of two ranks.
        results = train(epochs=12) @ pool
        print("ranks:", [result["rank"] for result in results], "of", results[0]["ranks"])
        assert results[0]["accuracy"] == results[1]["accuracy"]
        print(f"test accuracy {results[0]['accuracy']:.3f}")


if __name__ == "__main__":
    main()
