"""What a Trainer minimises: the loss of a batch, how much each micro-batch counts, and what it costs to compute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from . import loss
from .batches import MicroBatch
from .evaluation import named_in

__all__ = ["Objective"]

_log = logging.getLogger(__name__)


class Objective:
    """The loss of one model, as its arguments and its user say it.

    compute: the user's own loss, from outputs and labels; None: the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        device: torch.device,
        compute: Callable[..., torch.Tensor] | None,
    ) -> None:
        self._args, self._device = args, device
        self._counts_itself = loss.takes_num_items(model if compute is None else compute)
        self._shifts_labels = loss.shifts_labels(model)
        self._smoothing = _smoothing_of(model, args, is_given_a_loss=compute is not None)
        self._weights: int | None = None  # parameters but for tables of embeddings, counted when needed

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        compute: Callable[..., torch.Tensor] | None,
        num_items: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Any]:
        """The mean loss of a batch, and the outputs of the model. num_items: what is divided by instead."""
        counted = {} if num_items is None else {"num_items_in_batch": num_items}
        labels, rest = loss.apart(inputs, self._args.label_names)
        if compute is not None:
            outputs = loss.call(model, rest)
            return compute(outputs, labels, **counted), outputs
        if self._smoothing and labels is not None:
            outputs = loss.call(model, rest)
            return self._smoothed(outputs, labels, num_items), outputs
        outputs = loss.call(model, inputs, **counted)
        return loss.loss_of(outputs, model), outputs

    def weigh(self, batches: list[MicroBatch], *, ranks: Ranks, group: Any = None) -> loss.Weights:
        """How much each of a step's micro-batches counts. Collective. ranks, group: as `loss.weigh` takes them."""
        return loss.weigh(
            batches,
            args=self._args,
            ranks=ranks,
            group=group,
            device=self._device,
            counts_itself=self._counts_itself,
            shifts_labels=self._shifts_labels,
        )

    def weight_of(self, batch: MicroBatch) -> torch.Tensor:
        """How much the mean loss of one batch counts in an evaluation."""
        return loss.weight_of(batch, shifts_labels=self._shifts_labels).to(self._device)

    def floating_point_ops(self, model: nn.Module, inputs: Any, tokens: int) -> float:
        """Count those of forward and backward: by the model itself, else 6 for each parameter and token."""
        counts = getattr(model, "floating_point_ops", None)
        if counts is not None and isinstance(inputs, Mapping):
            return float(counts(inputs))
        if self._weights is None:
            tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
            self._weights = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in tables)
        return 6.0 * tokens * self._weights

    def _smoothed(self, outputs: Any, labels: Any, num_items: torch.Tensor | None) -> torch.Tensor:
        """The cross entropy of logits and smoothed labels: (), the mean over labels that are not IGNORED.

        A part of each label's weight is shared by all classes.
        outputs: logits (..., C) as "logits", `.logits`, the first of several, or the tensor itself. labels: (...)
        integers. Where the model shifts labels, each position predicts the label of the next.

        Raises: UsageError for outputs without logits, and for labels that are not numbers of classes.
        """
        found = named_in(outputs, "logits")
        logits = found if isinstance(found, torch.Tensor) and found.ndim > 1 else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or logits is None:
            given = f"{type(outputs).__name__} and labels of {getattr(labels, 'dtype', type(labels).__name__)}"
            raise UsageError(
                f"TrainingArguments.label_smoothing_factor={self._smoothing}: needs logits and labels that are numbers "
                f"of classes, not {given}; give Trainer a compute_loss_func that smooths, or set it to 0"
            )
        if self._shifts_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        total = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            labels.reshape(-1).to(logits.device),
            ignore_index=loss.IGNORED,
            label_smoothing=self._smoothing,
            reduction="sum",
        )
        count = labels.ne(loss.IGNORED).sum().clamp(min=1) if num_items is None else num_items.to(total.device)
        return total / count


def _smoothing_of(model: nn.Module, args: TrainingArguments, *, is_given_a_loss: bool) -> float:
    """How much is shared: 0 where the user's own loss, or several labels for each sample, leave nothing to share."""
    factor = args.label_smoothing_factor
    several = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
    if factor and (is_given_a_loss or several):
        why = "compute_loss_func makes the loss" if is_given_a_loss else "the model's samples have several labels"
        _log.warning("%s.label_smoothing_factor=%g does nothing: %s", type(args).__name__, factor, why)
        return 0.0
    return factor
