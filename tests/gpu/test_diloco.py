"""DiLoCo on a device: the server adds up on the CPU, and each worker's model stays where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import skyward as sky
from tests.gpu.conftest import Device, Figures
from tests.gpu.models import make_classifier, rows, score, settings

pytestmark = pytest.mark.gpu


def train(server: str, token: str, folder: str, device: str) -> dict[str, Any]:
    import os

    from skyward.training import DiLoCoCallback, Trainer, TrainingArguments

    info = sky.instance_info()
    assert info is not None
    os.environ["DILOCO_TOKEN"] = token
    joining = DiLoCoCallback(server, sync_every=15, worker_id=f"node-{info.node}")
    args = TrainingArguments(**settings(f"{folder}/{info.node}", device, bf16=device == "cuda"))
    trainer = Trainer(make_classifier(), args, train_dataset=sky.shard(rows(1280)), callbacks=[joining])
    trainer.train()
    return {
        "device": next(trainer.model.parameters()).device.type,
        "weights": [weights.detach().cpu() for weights in trainer.model.parameters()],
        "accuracy": score(trainer.model, rows(200))["accuracy"],
        "logs": [record for record in trainer.state.log_history if "diloco/sync_count" in record],
    }


def test_workers_on_a_device_end_with_the_same_model(
    two_nodes: sky.ComputePool, tmp_path: Path, device: Device, figures: Figures
) -> None:
    pytest.importorskip("uvicorn")
    from skyward.training.diloco import DiLoCoServer

    with DiLoCoServer(num_workers=2) as server:
        found = sky.compute(train)(server.address, server.token, str(tmp_path), device) @ two_nodes
    first, second = found
    assert first["device"] == second["device"] == device
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert min(first["accuracy"], second["accuracy"]) > 0.8
    last = first["logs"][-1]
    assert last["diloco/sync_count"] == 4
    figures("seconds of a synchronisation", round(last["diloco/last_sync_time"], 3))
