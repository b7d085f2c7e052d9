"""A fit of Keras with the torch backend as the worker of a server, in one process. It prints the outcome as JSON."""

# ruff: noqa: E402  # TensorFlow is put out of the way before Keras is imported

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

sys.modules["tensorflow"] = None  # type: ignore[assignment]  # Keras does without

import keras
import numpy as np
import torch

from skyward.training import DiLoCoCallback, KerasCallbacks, TrainerCallback
from skyward.training.diloco import DiLoCoSampler
from tests.training.diloco.runs import TOKEN, serving

X = (np.arange(32.0) / 32)[:, None].astype("float32")


class StopAt(TrainerCallback):
    def on_step_end(self, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            control.stop()


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_log(self, logs: dict[str, Any], **_: Any) -> None:
        self.seen.append(logs.get("diloco/sync_count", self.seen[-1] if self.seen else 0))


def fit(address: str, folder: str, *callbacks: Any, **chosen: Any) -> Any:
    """Train for 12 steps, 4 in an epoch, each of two batches. Workers must agree on the layers' names."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(1, name="line"), keras.layers.BatchNormalization(name="norm")]
    model = keras.Sequential([keras.Input((1,)), *layers], name="model")
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    joining = DiLoCoCallback(address, sync_every=3, worker_id="a", bf16_comm=False, heartbeat_interval=0)
    ours = KerasCallbacks([joining, *callbacks], output_dir=folder, logging_steps=1, **chosen)
    model.fit(X, 2 * X, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[ours])
    return [weights.tolist() for weights in model.get_weights()]


def rows_read(address: str, folder: str) -> list[int]:
    """Train for an epoch of 24 rows with a loader of torch, and return them as they were read."""
    read: list[int] = []

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return X[index], 2 * X[index]

    joining = DiLoCoCallback(address, sync_every=3, worker_id="a", heartbeat_interval=0)
    loader = torch.utils.data.DataLoader(Rows(), 2, sampler=DiLoCoSampler(Rows(), joining))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="line")], name="model")
    model.compile("sgd", "mse")
    model.fit(loader, shuffle=False, verbose=0, callbacks=[KerasCallbacks([joining], output_dir=folder)])
    return read


def main() -> None:
    os.environ["DILOCO_TOKEN"] = TOKEN
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        with serving() as server:
            whole = fit(server.address, f"{folder}/whole", counts)
            found = {"round": server.status()["round"], "counts": counts.seen, "whole": whole}
        with serving() as server:
            fit(server.address, f"{folder}/stopped", StopAt())
            found["resumed"] = fit(server.address, f"{folder}/stopped", resume_from_checkpoint=True)
        with serving() as server:
            found["read"] = rows_read(server.address, f"{folder}/rows")
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
