"""Validation of a Lightning module on a worker: its own `validation_step` and metrics, run by a Trainer.

Names, means and metric objects are the same as in Lightning's inline validation, bit for bit on one machine. The worker
may be a thread in the process of a rank, but must not communicate with other ranks, which are training. The Trainer
therefore has one device, and torchmetrics objects do not synchronize.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

_quiet: ContextVar[bool] = ContextVar("skyward_quiet_validation", default=False)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Payload of `validate`."""

    loaders: Callable[[], Any]
    """Factory of the validation data: a DataLoader, another iterable, or several."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer: accelerator, precision, limit_val_batches, ..."""
    package: str = "lightning.pytorch"
    """Name of Lightning's package."""


def validate(model: Any, validation: Validation) -> dict[str, float]:
    """Return the metrics that a module logs in a validation, as means over the epoch.

    A model without a `validation_step`, Lightning's or not, returns `val_loss`: the mean cross entropy of `model(x)`
    against `y` over all (x, y) of the loader.
    """
    loaders = validation.loaders()
    if not _has_validation_step(model, validation.package):
        return {"val_loss": _cross_entropy(model, loaders)}
    _apart(model)
    with _without_chatter(validation.package):
        trainer = _trainer(validation)
        trainer.validate(model, dataloaders=loaders, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _trainer(validation: Validation) -> Any:
    environments = import_module(f"{validation.package}.plugins.environments")
    options: dict[str, Any] = {
        "devices": 1,
        # Without it, Lightning would detect the process group of which this process may be a rank.
        "plugins": [environments.LightningEnvironment()],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return import_module(validation.package).Trainer(**{**options, **validation.options})


def _has_validation_step(model: Any, package: str) -> bool:
    base = import_module(package).LightningModule
    return isinstance(model, base) and type(model).validation_step is not base.validation_step


def _apart(model: Any) -> None:
    """Keep the model's torchmetrics from synchronizing with the ranks of this process's group, which are training."""
    for module in model.modules():
        if hasattr(module, "distributed_available_fn"):
            module.distributed_available_fn = _nobody


def _nobody() -> bool:
    return False


def _cross_entropy(model: Any, loaders: Any) -> float:
    import torch
    from torch.nn.functional import cross_entropy

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    total, rows = 0.0, 0
    model.eval()
    with torch.no_grad():
        for x, y in loaders:
            total += cross_entropy(model(x.to(device)), y.to(device), reduction="sum").item()
            rows += len(y)
    return total / max(1, rows)


@contextmanager
def _without_chatter(package: str) -> Iterator[None]:
    """Silence a Trainer's log lines about devices, in this thread only."""
    logger = logging.getLogger(f"{package}.utilities.rank_zero")
    if _keep not in logger.filters:
        logger.addFilter(_keep)
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


_keep: Any = SimpleNamespace(filter=lambda record: record.levelno > logging.INFO or not _quiet.get())
