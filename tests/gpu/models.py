"""A model and data for the GPU tests to train. They are small, so that a rehearsal can run on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["Classifier", "make_classifier", "rows", "score", "settings"]


class Classifier(nn.Module):
    """Model that tells which quarter of the plane a point is in. x: (B, 2) float32, labels: (B,) int64"""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(2, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_classifier() -> Classifier:
    """Make the model with the same first weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier()


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    labels = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    return [{"x": point, "labels": label} for point, label in zip(points, labels, strict=True)]


def score(model: nn.Module, held_out: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Return the accuracy, computed where the model is."""
    device = next(model.parameters()).device
    batch = {name: torch.stack([row[name] for row in held_out]).to(device) for name in ("x", "labels")}
    with torch.inference_mode():
        found = model(batch["x"])["logits"].argmax(1)
    return {"accuracy": (found == batch["labels"]).double().mean().item()}


def settings(folder: str, device: str, **changes: Any) -> dict[str, Any]:
    """Return TrainingArguments for 60 steps, with a log every 10."""
    return {
        "output_dir": folder,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 32,
        "learning_rate": 0.01,
        "logging_steps": 10,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        **changes,
    }
