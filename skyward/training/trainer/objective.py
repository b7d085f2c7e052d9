"""What a Trainer minimises: the loss of a batch, how much each micro-batch counts, and what it costs to compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..agree import Ranks
from . import loss
from .assembly import Assembly
from .batches import MicroBatch
from .smoothing import smoothed

__all__ = ["Objective"]


class Objective(Assembly):
    """Forward and backward of one micro-batch."""

    def _weigh(self, batches: list[MicroBatch]) -> loss.Weights:
        return self._weights_of(batches, ranks=self.ranks)

    def _weights_of(self, batches: list[MicroBatch], *, ranks: Ranks, group: Any = None) -> loss.Weights:
        return loss.weigh(
            batches,
            args=self.args,
            ranks=ranks,
            group=group,
            device=self.device,
            counts_itself=self._counts_itself,
            shifts_labels=self._shifts_labels,
        )

    def training_step(
        self, model: nn.Module, inputs: Any, factor: float | torch.Tensor, num_items_in_batch: torch.Tensor | None
    ) -> torch.Tensor:
        """Forward and backward of a micro-batch that counts `factor`. Gives its share of the step's loss, detached."""
        with self._precision.autocast():
            value = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        value = value * factor
        self._precision.backward(value)
        share: torch.Tensor = value.detach().float()
        return share

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The mean loss of a batch, and what the model gave. To be overridden.

        num_items_in_batch: labels of the whole step, over all ranks, for a model or a compute_loss_func that takes it:
        it divides by it then.
        """
        counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        labels, rest = loss.apart(inputs, self.args.label_names)
        if self.compute_loss_func is not None:
            outputs = loss.call(model, rest)
            value = self.compute_loss_func(outputs, labels, **counted)
        elif self._smoothing and labels is not None:
            outputs = loss.call(model, rest)
            value = smoothed(
                outputs,
                labels,
                factor=self._smoothing,
                shifts_labels=self._shifts_labels,
                num_items=num_items_in_batch,
            )
        else:
            outputs = loss.call(model, inputs, **counted)
            value = loss.loss_of(outputs, model)
        return (value, outputs) if return_outputs else value

    def floating_point_ops(self, inputs: Any, tokens: int) -> float:
        """Of forward and backward: what the model says itself, else 6 for each parameter and token."""
        counts = getattr(self.model, "floating_point_ops", None)
        if counts is not None and isinstance(inputs, Mapping):
            return float(counts(inputs))
        if self._weights is None:
            tables = {id(each.weight) for each in self.model.modules() if isinstance(each, nn.Embedding)}
            self._weights = sum(each.numel() for each in self.model.parameters() if id(each) not in tables)
        return 6.0 * tokens * self._weights

    def _count(self, batch: MicroBatch) -> float | torch.Tensor:
        return loss.weight_of(batch, shifts_labels=self._shifts_labels).to(self.device)
