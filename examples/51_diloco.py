"""Two machines train one model, and exchange their progress every 50 steps instead of in each one (DiLoCo).

python examples/51_diloco.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import skyward as sky

STEPS, SYNC_EVERY = 200, 50


def load_digits() -> Any:
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    x, y = datasets.load_digits(return_X_y=True)
    return train_test_split((x / 16).astype("float32"), y, random_state=0)


@sky.compute
@sky.stdout(only="head")
@sky.integrations.diloco(sync_every=SYNC_EVERY)
def train(folder: str) -> tuple[int, float, float]:
    """Train on this node's half of the digits. Return the synchronisations, the megabytes sent, and the accuracy."""
    import torch

    from skyward.training import DiLoCoCallback, Trainer, TrainingArguments

    class Classifier(torch.nn.Sequential):
        def forward(self, x: Any, labels: Any = None) -> Any:
            logits = super().forward(x)
            return logits if labels is None else {"loss": torch.nn.functional.cross_entropy(logits, labels)}

    node = sky.instance_info().node
    torch.manual_seed(0)  # the nodes begin with the same model, whichever is the first
    x_train, x_test, y_train, y_test = load_digits()
    rows = [{"x": x, "labels": y} for x, y in zip(sky.shard(x_train), sky.shard(y_train), strict=True)]
    args = TrainingArguments(output_dir=f"{folder}/{node}", max_steps=STEPS, per_device_train_batch_size=32,
               learning_rate=3e-3, logging_steps=SYNC_EVERY, save_strategy="no", disable_tqdm=True)  # fmt: skip
    model = Classifier(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[DiLoCoCallback()])
    trainer.train()
    logs = [record for record in trainer.state.log_history if "diloco/sync_count" in record]
    sent = sum(record["diloco/last_send_mb"] for record in logs)
    accuracy = (model.cpu()(torch.tensor(x_test)).argmax(1) == torch.tensor(y_test)).double().mean()
    return logs[-1]["diloco/sync_count"], sent, accuracy.item()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        # Each node is a worker with data of its own, and this program is their server for the length of the call.
        for node, (count, sent, accuracy) in enumerate(train(folder) @ pool):
            print(f"node {node}: {count} synchronisations, {sent:.3f} MB sent, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
