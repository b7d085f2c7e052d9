"""Objective of a Trainer: the loss of a batch of any shape, and the weight of each micro-batch.

A model's loss is the mean over its batch. The gradient of a step must be that of the mean over the whole step.
Micro-batches therefore count by their size: by tokens with a label if each token has one, otherwise by samples.
Dividing by the number of micro-batches would be right only if all had the same size.
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

_log = logging.getLogger(__name__)

IGNORED = -100
"""Label that cross entropy ignores."""

_SHIFTING = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")
"""Loss types that shift labels. Source: transformers 5.23, LOSS_MAPPING of loss/loss_utils.py.

It has no entry for GPT2LMHeadModel and other older names, whose losses shift labels too. Hugging Face's Trainer assumes
that they do not."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of a step's micro-batches."""

    factors: Sequence[float | torch.Tensor]
    """Factor of each micro-batch's loss."""
    num_items_in_batch: torch.Tensor | None
    """Labels of the whole step, for a model that divides by them itself; else None."""


class Objective:
    """Loss of one model.

    Args:
        model: the model.
        args: settings of the run.
        device: this rank's device.
        compute: the user's `(outputs, labels) -> loss`; None: the model's own loss.
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
        self._weights: int | None = None  # values in parameters except embeddings, counted when first needed

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        compute: Callable[..., torch.Tensor] | None,
        num_items: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of a batch, and the model's outputs.

        Args:
            model: the model.
            inputs: the batch, on the device.
            compute: the user's loss function; None: the model's own loss.
            num_items: divisor in place of the batch's size; None: the size.
        """
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
        """Return the weight of each of a step's micro-batches. Collective.

        Args:
            batches: this rank's micro-batches.
            ranks: ranks that have batches of their own.
            group: their process group; None: the default one.
        """
        # DistributedDataParallel averages gradients over the ranks, so every factor is multiplied by their number.
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
        """Return the weight of one batch's mean loss in an evaluation: () float64."""
        counts = self._label_counts([batch], counts_itself=False)
        weight = torch.tensor(float(batch.samples), dtype=torch.float64) if counts is None else counts[0].double()
        return weight.to(self._device)

    def floating_point_ops(self, model: nn.Module, inputs: Any, tokens: int) -> float:
        """Return the operations of forward and backward: the model's own count, else 6 per parameter and token."""
        counts = getattr(model, "floating_point_ops", None)
        if counts is not None and isinstance(inputs, Mapping):
            return float(counts(inputs))
        if self._weights is None:
            tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
            self._weights = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in tables)
        return 6.0 * tokens * self._weights

    def _label_counts(self, batches: Sequence[MicroBatch], *, counts_itself: bool) -> list[torch.Tensor] | None:
        """Return the number of labels in each micro-batch; None if samples count instead.

        Args:
            batches: this rank's micro-batches.
            counts_itself: whether the model divides by the number of labels itself; then one label per sample counts.
        """
        counts: list[torch.Tensor] = []
        for batch in batches:
            labels = labels_of(batch.inputs, None)
            is_class = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
            if not is_class or labels.ndim < (1 if counts_itself else 2):
                return None
            shifted = batch.inputs.get("shift_labels") if isinstance(batch.inputs, Mapping) else None
            if isinstance(shifted, torch.Tensor):  # made by Hugging Face's collator for rows without padding
                labels = shifted
            elif self._shifts_labels and labels.ndim > 1:
                labels = labels[..., 1:]
            counts.append(labels.ne(IGNORED).sum() * (batch.samples > 0))
        return counts

    def _smoothed(self, outputs: Any, labels: Any, num_items: torch.Tensor | None) -> torch.Tensor:
        """Return the cross entropy of logits and smoothed labels: (), the mean over labels that are not IGNORED.

        Args:
            outputs: logits (..., C), as "logits", `.logits`, the first of several outputs, or the only one.
            labels: (...) integers. If the model shifts labels, each position predicts the label of the next one.
            num_items: divisor in place of the number of labels; None: that number.

        Raises:
            UsageError: there are no logits, or the labels are not class indices.
        """
        logits = named_in(outputs, "logits")
        has_logits = isinstance(logits, torch.Tensor) and logits.ndim > 1
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not has_logits:
            kinds = f"{type(outputs).__name__} and labels of {getattr(labels, 'dtype', type(labels).__name__)}"
            raise UsageError(
                f"TrainingArguments.label_smoothing_factor={self._smoothing}: needs logits and class indices as "
                f"labels, not {kinds}; pass a compute_loss_func that smooths, or set label_smoothing_factor=0"
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
    """Move the tensors of a batch to a device."""
    return map_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf)


def call(model: nn.Module, inputs: Any, **more: Any) -> Any:
    """Call a model: dicts by keyword, tuples and lists by position, anything else as the only argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs, **more)
    if isinstance(inputs, list | tuple):
        try:
            return model(*inputs, **more)
        except TypeError as error:
            if not _takes(unwrapped(model), inputs, more):
                error.add_note(
                    f"the batch has {len(inputs)} parts, passed to the model by position; for a model that takes only "
                    "the first one, pass compute_loss_func=(outputs, labels) -> loss"
                )
            raise
    return model(inputs, **more)


def _takes(model: nn.Module, inputs: Sequence[Any], more: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*inputs, **more)
    except TypeError:  # the signature does not take them
        return False
    return True


def loss_of(outputs: Any, model: nn.Module) -> torch.Tensor:
    """Return the loss in a model's outputs: `outputs["loss"]`, `outputs.loss`, the first of a tuple, or the tensor.

    A loss by name or place may have one value per sample, (B,), which are averaged. A tensor alone must be ().

    Raises:
        UsageError: there is no loss.
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
            f"model={name}: returned no loss, {has}; return the loss first, as 'loss' or alone, or pass a "
            "compute_loss_func to the trainer"
        )
    is_alone = isinstance(outputs, torch.Tensor) and loss.numel() > 1
    # Such a tensor is most likely logits. Taking its mean for the loss would train nonsense without any error.
    if is_alone or (loss.ndim > 1 and not is_named):
        raise UsageError(
            f"model={name}: returned a tensor of shape {tuple(loss.shape)} in place of a loss; return a single number "
            "first, as 'loss' or alone, or pass a compute_loss_func to the trainer"
        )
    return loss.mean() if loss.ndim else loss


def labels_of(inputs: Any, names: Sequence[str] | None) -> Any:
    """Return the labels in a batch; None if there are none.

    Args:
        inputs: a dict, whose `names` are the labels; or a tuple of several, whose last element is.
        names: keys of the labels; None: "labels". The labels of several keys are a tuple.
    """
    if isinstance(inputs, Mapping):
        values = tuple(inputs.get(name) for name in (names or ("labels",)))
        if not values or any(labels is None for labels in values):
            return None
        return values[0] if len(values) == 1 else values
    if isinstance(inputs, list | tuple) and len(inputs) > 1:
        return inputs[-1]
    return None


def apart(inputs: Any, names: Any) -> tuple[Any, Any]:
    """Split a batch into its labels and the rest."""
    labels = labels_of(inputs, names)
    if labels is None:
        return None, inputs
    if isinstance(inputs, Mapping):
        return labels, {key: value for key, value in inputs.items() if key not in (names or ("labels",))}
    return labels, inputs[:-1]


def _takes_num_items(function: Callable[..., Any] | nn.Module) -> bool:
    """Return whether a model or loss function divides by the number of labels of the whole step itself."""
    # Taking **kwargs, as all of Hugging Face's models do, proves nothing: BERT and others drop them, and a loss that is
    # not divided would count once for each micro-batch and rank. For models that would divide, the weighed mean, which
    # is the fallback, gives the same loss.
    if isinstance(function, nn.Module):
        says = getattr(function, "accepts_loss_kwargs", None)
        if says is not None:
            return bool(says)
        function = function.forward
    return "num_items_in_batch" in inspect.signature(function).parameters


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's loss ignores each row's first label, as Hugging Face's causal language models do."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False  # the inputs of its decoder are shifted already
    base = getattr(model, "get_base_model", None)  # PEFT's wrapper
    kind, name = getattr(model, "loss_type", None), type(model if base is None else base()).__name__
    if kind is not None:
        return kind in _SHIFTING
    return name.endswith("LMHeadModel") and not name.endswith(("XLNetLMHeadModel", "WithLMHeadModel"))


def tokens_in(inputs: Any, model: nn.Module) -> int:
    """Return the number of tokens in a batch, padding included: the size of the model's main input, 0 without text."""
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
    """Return the label smoothing to apply: 0 if the user's loss, or several labels per sample, exclude it."""
    factor = args.label_smoothing_factor
    several = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
    if factor and (is_given_a_loss or several):
        why = "compute_loss_func makes the loss" if is_given_a_loss else "the model's samples have several labels"
        _log.warning("%s.label_smoothing_factor=%g has no effect: %s", type(args).__name__, factor, why)
        return 0.0
    return factor
