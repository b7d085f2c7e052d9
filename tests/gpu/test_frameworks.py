"""Frameworks on a device, with their integrations and our callbacks, if they are installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import skyward as sky
from tests.gpu.conftest import Device, Figures
from tests.gpu.models import make_classifier, rows, score, settings

pytestmark = pytest.mark.gpu


def fine_tune(folder: str, device: str) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from skyward.training import HFCallbacks, JsonLogger, PeakMemory

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))
    data = [{"input_ids": (row := torch.arange(start, start + 32) % 64), "labels": row} for start in range(64)]
    peak = PeakMemory()
    arguments = TrainingArguments(
        output_dir=folder, max_steps=20, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=5,
        report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=device == "cpu", bf16=device == "cuda",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[HFCallbacks([JsonLogger(), peak])])
    trainer.train()
    return {
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "device": next(trainer.model.parameters()).device.type,
        "peak": peak.peaks,
    }


def test_transformers_trains_in_a_rank(pool: sky.ComputePool, tmp_path: Path, device: Device, figures: Figures) -> None:
    pytest.importorskip("transformers")
    found = sky.compute(sky.integrations.transformers(fine_tune))(str(tmp_path), device) >> pool
    assert found["device"] == device
    assert found["losses"][-1] < found["losses"][0]
    figures("peak MiB", round(found["peak"][0] / 2**20))


def accelerated(folder: str, device: str) -> tuple[str, float]:
    from accelerate import Accelerator

    from skyward.training import TrainingArguments
    from skyward.training.trainer import AccelTrainer

    args = TrainingArguments(**settings(folder, device))
    accelerator = Accelerator(cpu=device == "cpu")
    trainer = AccelTrainer(make_classifier(), args, train_dataset=rows(640), accelerator=accelerator)
    trainer.train()
    return next(trainer.model.parameters()).device.type, score(trainer.model, rows(200))["accuracy"]


def test_accelerate_trains_in_a_rank(pool: sky.ComputePool, tmp_path: Path, device: Device) -> None:
    pytest.importorskip("accelerate")
    where, accuracy = sky.compute(sky.integrations.accelerate(accelerated))(str(tmp_path), device) >> pool
    assert where == device
    assert accuracy > 0.8


def lightning(folder: str, device: str) -> tuple[str, list[dict[str, Any]]]:
    import lightning as L
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from skyward.training.sakura import SakuraLightningCallback

    class Module(L.LightningModule):  # type: ignore[misc]  # Lightning is not read by mypy
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 4)
            self.place = ""

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.place = batch[0].device.type
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    points = torch.stack([row["x"] for row in rows(320)]), torch.stack([row["labels"] for row in rows(320)])

    def loader() -> DataLoader[Any]:
        return DataLoader(TensorDataset(*points), batch_size=32)

    beside, module = SakuraLightningCallback(val_loader_factory=loader, model_factory=Module, gate="always"), Module()
    trainer = L.Trainer(
        default_root_dir=folder, max_epochs=3, accelerator="gpu" if device == "cuda" else "cpu", devices=1,
        callbacks=[beside], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader())
    return module.place, list(beside.history)


def test_lightning_trains_in_a_rank(pool: sky.ComputePool, tmp_path: Path, device: Device) -> None:
    pytest.importorskip("lightning")
    where, history = sky.compute(sky.integrations.lightning(lightning))(str(tmp_path), device) >> pool
    assert where == device
    losses = [each["val_loss"] for each in history]
    assert len(losses) == 3, history
    assert losses[-1] < losses[0]


def keras_on(folder: str, backend: str) -> tuple[str, list[float]]:
    import keras
    import numpy as np

    from skyward.training import JsonLogger, KerasCallbacks

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    data = rows(640)
    x, y = np.stack([row["x"].numpy() for row in data]), np.stack([row["labels"].numpy() for row in data])
    callbacks = KerasCallbacks([JsonLogger()], output_dir=folder, logging_steps=20)
    found = model.fit(x, y, epochs=3, batch_size=32, verbose=0, callbacks=[callbacks])
    weights = model.trainable_variables[0].value
    place = weights.device.type if backend == "torch" else next(iter(weights.devices())).platform
    return place, found.history["loss"]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_trains_in_a_rank(backend: Literal["torch", "jax"], tmp_path: Path, device: Device) -> None:
    """A slot keeps the backend with which it imported Keras, so each backend has a pool of its own."""
    for name in ("keras", backend):
        if importlib.util.find_spec(name) is None:  # not imported here: Keras would take its own choice of a backend
            pytest.skip(f"{name} is not installed")
    train = sky.compute(sky.integrations.keras(backend=backend)(keras_on))
    with sky.ComputePool(sky.Local()) as pool:
        where, losses = train(str(tmp_path), backend) >> pool
    assert where == {"cpu": "cpu", "cuda": "cuda" if backend == "torch" else "gpu"}[device]
    assert losses[-1] < losses[0]


def test_joblib_sends_to_slots_that_have_a_device(device: Device) -> None:
    pytest.importorskip("joblib")
    from joblib import Parallel, delayed

    with sky.integrations.JoblibPool(sky.Local(), nodes=1):
        found = Parallel()(delayed(norm)(size, device) for size in range(1, 9))
    assert found == pytest.approx([float(size) for size in range(1, 9)])


def norm(size: int, device: str) -> float:
    return float(torch.ones(size * size, device=device).norm())


def test_versions_are_those_of_this_machine(figures: Figures) -> None:
    from importlib import metadata

    for name in ("torch", "jax", "transformers", "lightning", "accelerate", "safetensors", "joblib", "keras", "numpy"):
        try:
            figures(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            figures(name, "not installed")
    figures("CUDA", torch.version.cuda or "none")
    figures("cores", os.cpu_count())
