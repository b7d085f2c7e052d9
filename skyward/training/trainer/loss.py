"""From a batch to its loss, for whatever shape batches and models have, and how much each micro-batch counts.

A model's loss is the mean over its batch. The gradient of a step must be that of the mean over everything in it, so
micro-batches count by how much is in them: tokens with a label where labels have one for each, samples otherwise.
Dividing by the number of micro-batches would be right only where all have equally much.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from .batches import MicroBatch
from .world import unwrap

__all__ = [
    "IGNORED",
    "Weights",
    "apart",
    "call",
    "labels_of",
    "loss_of",
    "on_device",
    "shifts_labels",
    "takes_num_items",
    "tokens_in",
    "weigh",
    "weight_of",
]

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


def on_device(value: Any, device: torch.device) -> Any:
    """A batch with its tensors on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: on_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(on_device(item, device) for item in value)
    return value


def call(model: nn.Module, inputs: Any, **more: Any) -> Any:
    """Dictionaries by keyword, tuples and lists by position, anything else as the one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs, **more)
    if isinstance(inputs, list | tuple):
        try:
            return model(*inputs, **more)
        except TypeError as error:
            if not _takes(unwrap(model), inputs, more):
                error.add_note(
                    f"the batch has {len(inputs)} parts, given one after the other; a model that takes the first only "
                    "needs compute_loss_func=, called as compute_loss_func(outputs, labels)"
                )
            raise
    return model(inputs, **more)


def _takes(model: nn.Module, inputs: Sequence[Any], more: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*inputs, **more)
    except TypeError:
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
    if not isinstance(loss, torch.Tensor):
        has = f"only {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        raise UsageError(
            f"model={type(unwrap(model)).__name__}: gave no loss, {has}; return the loss first, as 'loss' or alone, or "
            "give Trainer a compute_loss_func"
        )
    is_alone = isinstance(outputs, torch.Tensor) and loss.numel() > 1
    if is_alone or (loss.ndim > 1 and not is_named):  # logits: their mean would be trained, and nobody would see it
        raise UsageError(
            f"model={type(unwrap(model)).__name__}: gave a tensor of shape {tuple(loss.shape)} where its loss should "
            "be; return a single number first, as 'loss' or alone, or give Trainer a compute_loss_func"
        )
    return loss.mean() if loss.ndim else loss


def labels_of(inputs: Any, names: Sequence[str] | None) -> Any:
    """The labels in a batch: those under `names` (None: "labels"), a tuple of them where several are named, or the
    last element of a tuple of several. None where there are none.
    """
    if isinstance(inputs, Mapping):
        found = tuple(inputs.get(name) for name in (names or ("labels",)))
        if not found or any(each is None for each in found):
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


def takes_num_items(function: Callable[..., Any] | nn.Module) -> bool:
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


def weigh(
    batches: Sequence[MicroBatch],
    *,
    args: TrainingArguments,
    ranks: Ranks,
    device: torch.device,
    counts_itself: bool,
    shifts_labels: bool,
    group: Any = None,
) -> Weights:
    """How much each of a step's micro-batches counts.

    ranks: those that have batches of their own; group: torch's process group of them, None: all there are.
    Gradients of ranks are averaged, so factors are larger by their number. counts_itself: the model divides by the
    number of labels of all. shifts_labels: it leaves out the first label of each row.
    """
    world = ranks.world_size
    counts = _label_counts(batches, counts_itself=counts_itself, shifts_labels=shifts_labels)
    if counts is None:
        own = [batch.samples for batch in batches]
        if all(batch.samples_of_all is not None for batch in batches):
            total = sum(batch.samples_of_all or 0 for batch in batches)
        else:
            total = int(_sum(torch.tensor(sum(own), device=device), world, group).item())
        return Weights(factors=[each * world / max(total, 1) for each in own], num_items_in_batch=None)
    mine = torch.stack([count.to(device) for count in counts])
    items = mine.sum()
    shared = args.average_tokens_across_devices
    if shared:
        items = _sum(items, world, group)
    items = items.clamp(min=1)
    scale = world if shared else 1
    if counts_itself:
        return Weights(factors=[float(scale * (batch.samples > 0)) for batch in batches], num_items_in_batch=items)
    return Weights(factors=list(mine * scale / items), num_items_in_batch=None)


def _label_counts(
    batches: Sequence[MicroBatch], *, counts_itself: bool, shifts_labels: bool
) -> list[torch.Tensor] | None:
    """Labels that count, of each micro-batch; None where samples are to be counted: labels of one each, or none."""
    found: list[torch.Tensor] = []
    for batch in batches:
        labels = labels_of(batch.inputs, None)
        if (
            not isinstance(labels, torch.Tensor)
            or labels.is_floating_point()
            or labels.ndim < (1 if counts_itself else 2)
        ):
            return None
        shifted = batch.inputs.get("shift_labels") if isinstance(batch.inputs, Mapping) else None
        if isinstance(shifted, torch.Tensor):  # by a collator of Hugging Face's, for rows without padding
            labels = shifted
        elif shifts_labels and labels.ndim > 1:
            labels = labels[..., 1:]
        found.append(labels.ne(IGNORED).sum() * (batch.samples > 0))
    return found


def _sum(value: torch.Tensor, world: int, group: Any) -> torch.Tensor:
    if world > 1:
        torch.distributed.all_reduce(value, group=group)
    return value


def weight_of(batch: MicroBatch, *, shifts_labels: bool) -> torch.Tensor:
    """How much a batch's mean loss counts in an evaluation: () float64"""
    counts = _label_counts([batch], counts_itself=False, shifts_labels=shifts_labels)
    return torch.tensor(float(batch.samples), dtype=torch.float64) if counts is None else counts[0].double()
