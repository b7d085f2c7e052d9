"""Label smoothing: a part of each label's weight is shared by all classes."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..arguments import TrainingArguments
from .evaluation import named_in
from .loss import IGNORED

__all__ = ["smoothed", "smoothing_of"]

_log = logging.getLogger(__name__)


def smoothing_of(model: nn.Module, args: TrainingArguments, *, is_given_a_loss: bool) -> float:
    """How much is shared: 0 where the user's own loss, or several labels for each sample, leave nothing to share."""
    factor = args.label_smoothing_factor
    several = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
    if factor and (is_given_a_loss or several):
        why = "compute_loss_func makes the loss" if is_given_a_loss else "the model's samples have several labels"
        _log.warning("%s.label_smoothing_factor=%g does nothing: %s", type(args).__name__, factor, why)
        return 0.0
    return factor


def smoothed(
    outputs: Any, labels: Any, *, factor: float, shifts_labels: bool, num_items: torch.Tensor | None
) -> torch.Tensor:
    """The cross entropy of logits and smoothed labels: (), the mean over labels that are not IGNORED.

    outputs: logits (..., C) as "logits", `.logits`, the first of several, or the tensor itself. labels: (...) integers.
    shifts_labels: each position predicts the label of the next. num_items: what is divided by instead.

    Raises: UsageError for what is no logits or no labels.
    """
    logits = _logits_in(outputs)
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or logits is None:
        found = f"{type(outputs).__name__} and labels of {getattr(labels, 'dtype', type(labels).__name__)}"
        raise UsageError(
            f"TrainingArguments.label_smoothing_factor={factor}: needs logits and labels that are numbers of classes, "
            f"not {found}; give Trainer a compute_loss_func that smooths, or set it to 0"
        )
    if shifts_labels:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    total = nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1).to(logits.device),
        ignore_index=IGNORED,
        label_smoothing=factor,
        reduction="sum",
    )
    return total / (labels.ne(IGNORED).sum().clamp(min=1) if num_items is None else num_items.to(total.device))


def _logits_in(outputs: Any) -> torch.Tensor | None:
    found = named_in(outputs, "logits")
    return found if isinstance(found, torch.Tensor) and found.ndim > 1 else None
