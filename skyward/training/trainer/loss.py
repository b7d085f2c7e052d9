"""The objective of a Trainer: the loss of a batch of any shape, and how much each micro-batch counts.

A model's loss is the mean over its batch. The gradient of a step must be that of the mean over everything in it, so
micro-batches count by how much is in them: tokens with a label where labels have one for each, samples otherwise.
Dividing by the number of micro-batches would be right only where all have equally much.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..nested import map_leaves
from ..parts import unwrapped
from .batches import MicroBatch
from .evaluation import named_in

__all__ = ["Objective", "Weights", "apart", "call", "labels_of", "on_device", "shifts_labels", "tokens_in"]

_log = logging.getLogger(__name__)

IGNORED = -100
"""The label that cross entropy leaves out."""

_SHIFTING = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")
"""Source: transformers 5.23, LOSS_MAPPING of loss/loss_utils.py. It has no entry for GPT2LMHeadModel and other older
names, whose loss shifts labels all the same, and Hugging Face's Trainer takes it that theirs do not."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """factors: of the micro-batches' losses. num_items_in_batch: what a model that counts for itself divides by."""

    factors: Sequence[float | torch.Tensor]
    num_items_in_batch: torch.Tensor | None


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
        self._counts_itself = _takes_num_items(model if compute is None else compute)
        self._shifts_labels = shifts_labels(model)
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
        labels, rest = apart(inputs, self._args.label_names)
        if compute is not None:
            outputs = call(model, rest)
            return compute(outputs, labels, **counted), outputs
        if self._smoothing and labels is not None:
            outputs = call(model, rest)
            return self._smoothed(outputs, labels, num_items), outputs
        outputs = call(model, inputs, **counted)
        return loss_of(outputs, model), outputs

    def weigh(self, batches: Sequence[MicroBatch], *, ranks: Ranks, group: Any = None) -> Weights:
        """Return how much each of a step's micro-batches counts. Collective.

        Gradients of ranks are averaged, so factors are larger by their number.

        Args:
            ranks: those that have batches of their own.
            group: torch's process group of them; None: all there are.
        """
        world = ranks.world_size
        counts = self._label_counts(batches, counts_itself=self._counts_itself)
        if counts is None:
            own = [batch.samples for batch in batches]
            if all(batch.samples_of_all is not None for batch in batches):
                total = sum(batch.samples_of_all or 0 for batch in batches)
            else:
                total = int(_sum(torch.tensor(sum(own), device=self._device), world, group).item())
            return Weights(factors=[samples * world / max(total, 1) for samples in own], num_items_in_batch=None)
        labels = torch.stack([count.to(self._device) for count in counts])
        items = labels.sum()
        is_shared = self._args.average_tokens_across_devices
        if is_shared:
            items = _sum(items, world, group)
        items = items.clamp(min=1)
        scale = world if is_shared else 1
        if self._counts_itself:
            return Weights(factors=[float(scale * (batch.samples > 0)) for batch in batches], num_items_in_batch=items)
        return Weights(factors=list(labels * scale / items), num_items_in_batch=None)

    def weight_of(self, batch: MicroBatch) -> torch.Tensor:
        """How much the mean loss of one batch counts in an evaluation: () float64"""
        counts = self._label_counts([batch], counts_itself=False)
        weight = torch.tensor(float(batch.samples), dtype=torch.float64) if counts is None else counts[0].double()
        return weight.to(self._device)

    def floating_point_ops(self, model: nn.Module, inputs: Any, tokens: int) -> float:
        """Count those of forward and backward: by the model itself, else 6 for each parameter and token."""
        counts = getattr(model, "floating_point_ops", None)
        if counts is not None and isinstance(inputs, Mapping):
            return float(counts(inputs))
        if self._weights is None:
            tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
            self._weights = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in tables)
        return 6.0 * tokens * self._weights

    def _label_counts(self, batches: Sequence[MicroBatch], *, counts_itself: bool) -> list[torch.Tensor] | None:
        """Labels that count, of each micro-batch; None where samples are to be counted: labels of one each, or none.

        counts_itself: the model divides by the number of labels of all.
        """
        counts: list[torch.Tensor] = []
        for batch in batches:
            labels = labels_of(batch.inputs, None)
            is_class = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
            if not is_class or labels.ndim < (1 if counts_itself else 2):
                return None
            shifted = batch.inputs.get("shift_labels") if isinstance(batch.inputs, Mapping) else None
            if isinstance(shifted, torch.Tensor):  # by a collator of Hugging Face's, for rows without padding
                labels = shifted
            elif self._shifts_labels and labels.ndim > 1:
                labels = labels[..., 1:]
            counts.append(labels.ne(IGNORED).sum() * (batch.samples > 0))
        return counts

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
            ignore_index=IGNORED,
            label_smoothing=self._smoothing,
            reduction="sum",
        )
        count = labels.ne(IGNORED).sum().clamp(min=1) if num_items is None else num_items.to(total.device)
        return total / count


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on `device`."""
    return map_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf)


def call(model: nn.Module, inputs: Any, **more: Any) -> Any:
    """Dictionaries by keyword, tuples and lists by position, anything else as the one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs, **more)
    if isinstance(inputs, list | tuple):
        try:
            return model(*inputs, **more)
        except TypeError as error:
            if not _takes(unwrapped(model), inputs, more):
                error.add_note(
                    f"the batch has {len(inputs)} parts, given one after the other; a model that takes the first only "
                    "needs compute_loss_func=, called as compute_loss_func(outputs, labels)"
                )
            raise
    return model(inputs, **more)


def _takes(model: nn.Module, inputs: Sequence[Any], more: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*inputs, **more)
    except TypeError:  # that is the question
        return False
    return True


def loss_of(outputs: Any, model: nn.Module) -> torch.Tensor:
    """The loss in what a model gives: `outputs["loss"]`, `outputs.loss`, the first of a tuple, or the tensor itself.
    What is the loss by its place or name may be one for each sample: () or (B,). A tensor alone is a single number.

    Raises: UsageError where there is none.
    """
    loss: Any = outputs
    is_named = isinstance(outputs, Mapping) or hasattr(outputs, "loss")
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        loss = outputs.loss
    elif isinstance(outputs, list | tuple) and outputs:
        loss = outputs[0]
    name = type(unwrapped(model)).__name__
    if not isinstance(loss, torch.Tensor):
        has = f"only {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        raise UsageError(
            f"model={name}: gave no loss, {has}; return the loss first, as 'loss' or alone, or give Trainer a "
            "compute_loss_func"
        )
    is_alone = isinstance(outputs, torch.Tensor) and loss.numel() > 1
    if is_alone or (loss.ndim > 1 and not is_named):  # logits: their mean would be trained, and nobody would see it
        raise UsageError(
            f"model={name}: gave a tensor of shape {tuple(loss.shape)} where its loss should be; return a "
            "single number first, as 'loss' or alone, or give Trainer a compute_loss_func"
        )
    return loss.mean() if loss.ndim else loss


def labels_of(inputs: Any, names: Sequence[str] | None) -> Any:
    """The labels in a batch: those under `names` (None: "labels"), a tuple of them where several are named, or the
    last element of a tuple of several. None where there are none.
    """
    if isinstance(inputs, Mapping):
        found = tuple(inputs.get(name) for name in (names or ("labels",)))
        if not found or any(labels is None for labels in found):
            return None
        return found[0] if len(found) == 1 else found
    if isinstance(inputs, list | tuple) and len(inputs) > 1:
        return inputs[-1]
    return None


def apart(inputs: Any, names: Any) -> tuple[Any, Any]:
    """A batch's labels, and the rest of it."""
    labels = labels_of(inputs, names)
    if labels is None:
        return None, inputs
    if isinstance(inputs, Mapping):
        return labels, {key: value for key, value in inputs.items() if key not in (names or ("labels",))}
    return labels, inputs[:-1]


def _takes_num_items(function: Callable[..., Any] | nn.Module) -> bool:
    """Whether a model, or a loss function, wants to divide by the number of labels of the whole step by itself.

    Taking `**kwargs`, as all of Hugging Face's models do, is no sign of it: BERT's among others drop them, and what is
    not divided counts once for each micro-batch and rank. Weighed means of those that would divide are the same.
    """
    if isinstance(function, nn.Module):
        says = getattr(function, "accepts_loss_kwargs", None)
        if says is not None:
            return bool(says)
        function = function.forward
    return "num_items_in_batch" in inspect.signature(function).parameters


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss leaves out each row's first label: Hugging Face's causal language models."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False  # what its decoder is given is shifted already
    base = getattr(model, "get_base_model", None)  # of PEFT's
    kind, name = getattr(model, "loss_type", None), type(model if base is None else base()).__name__
    if kind is not None:
        return kind in _SHIFTING
    return name.endswith("LMHeadModel") and not name.endswith(("XLNetLMHeadModel", "WithLMHeadModel"))


def tokens_in(inputs: Any, model: nn.Module) -> int:
    """How many tokens a batch has, padding too: the size of the model's main input. 0 for what is no text."""
    main = getattr(model, "main_input_name", "input_ids")
    tokens = inputs.get(main) if isinstance(inputs, Mapping) else None
    if tokens is None and isinstance(inputs, list | tuple) and inputs:
        tokens = inputs[0]
    is_text = isinstance(tokens, torch.Tensor) and not tokens.is_floating_point() and tokens.ndim == 2
    return tokens.numel() if is_text and tokens is not None else 0


def _sum(value: torch.Tensor, world: int, group: Any) -> torch.Tensor:
    if world > 1:
        torch.distributed.all_reduce(value, group=group)
    return value


def _smoothing_of(model: nn.Module, args: TrainingArguments, *, is_given_a_loss: bool) -> float:
    """How much is shared: 0 where the user's own loss, or several labels for each sample, leave nothing to share."""
    factor = args.label_smoothing_factor
    several = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
    if factor and (is_given_a_loss or several):
        why = "compute_loss_func makes the loss" if is_given_a_loss else "the model's samples have several labels"
        _log.warning("%s.label_smoothing_factor=%g does nothing: %s", type(args).__name__, factor, why)
        return 0.0
    return factor
