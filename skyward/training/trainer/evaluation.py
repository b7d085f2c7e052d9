"""Evaluation and prediction: every sample once, over all ranks, in the order of the data set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..agree import Ranks
from .batches import MicroBatch
from .stream import Stream

__all__ = ["Evaluated", "evaluate", "evaluating", "loss_in", "named_in", "outputs_without_loss", "plain"]

Step = Callable[[Any], tuple[torch.Tensor | None, Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """loss: the mean over all samples, or over all labels where each sample has several. None: the data has no labels.
    predictions, labels: (samples, ...), or tuples of such; None where they were not kept.
    """

    loss: float | None
    samples: int
    steps: int
    predictions: Any = None
    labels: Any = None


def evaluate(
    stream: Stream,
    *,
    step: Step,
    count: Callable[[MicroBatch], float | torch.Tensor],
    after_each: Callable[[], None],
    ranks: Ranks,
    keeps: bool,
    moves_every: int = 1,
) -> Evaluated:
    """Runs `step` (-> loss, predictions, labels) on every batch. Collective.

    count: how much a batch's mean loss counts. after_each: called after every batch. keeps: predictions and labels,
    which are moved to the CPU after `moves_every` batches.
    """
    stream.open(0, skip=0)
    total: torch.Tensor | float = 0.0
    weight: torch.Tensor | float = 0.0
    samples = steps = 0
    has_loss = False
    kept: list[tuple[Any, Any] | None] = []
    while batches := stream.take(1):
        (batch,) = batches
        loss, predictions, labels = step(batch.inputs)
        if loss is not None and batch.samples:
            has_loss = True
            share = count(batch)
            total, weight = total + loss.detach().double() * share, weight + share
        samples += batch.samples
        steps += 1
        if keeps:
            kept.append((predictions, labels) if batch.samples else None)
            if steps % moves_every == 0:
                kept[-moves_every:] = _moved(kept[-moves_every:])
        after_each()
    kept[steps - steps % moves_every :] = _moved(kept[steps - steps % moves_every :])
    parts = ranks.exchange((float(total), float(weight), samples, has_loss, kept))
    loss_sum, weight_sum = sum(part[0] for part in parts), sum(part[1] for part in parts)
    # Ranks hold neighbouring samples of each round: rounds in turn, and within them ranks, are the data set's order.
    ordered = [row for rows in zip(*(part[4] for part in parts), strict=True) for row in rows if row is not None]
    return Evaluated(
        loss=loss_sum / max(weight_sum, 1e-12) if any(part[3] for part in parts) else None,
        samples=sum(part[2] for part in parts),
        steps=steps,
        predictions=_join([row[0] for row in ordered]),
        labels=_join([row[1] for row in ordered]),
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within; afterwards every module has the mode it had, also one that was kept frozen."""
    were_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in were_training:
            module.training = True


def loss_in(outputs: Any) -> torch.Tensor | None:
    """The loss in what a model gives, if there is one."""
    found = named_in(outputs, "loss")
    return found if isinstance(found, torch.Tensor) and found.ndim == 0 else None


def named_in(outputs: Any, name: str) -> Any:
    """What a model gives under this name; else the first of several, or what it gives."""
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    if hasattr(outputs, name):
        return getattr(outputs, name)
    return outputs[0] if isinstance(outputs, list | tuple) and outputs else outputs


def outputs_without_loss(outputs: Any, ignored: tuple[str, ...]) -> Any:
    """The predictions in what a model gives: one tensor, a tuple of several, or None."""
    if isinstance(outputs, torch.Tensor):
        return outputs if outputs.ndim else None
    if isinstance(outputs, Mapping):
        found = tuple(value for key, value in outputs.items() if key not in ("loss", *ignored))
    elif isinstance(outputs, list | tuple):
        found = tuple(outputs[1:] if loss_in(outputs) is not None else outputs)
    else:
        return None
    return found[0] if len(found) == 1 else found or None


def plain(value: Any) -> Any:
    """Metrics as JSON can hold them: numbers of numpy and torch as Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value


def _moved(kept: list[tuple[Any, Any] | None]) -> list[tuple[Any, Any] | None]:
    return [None if each is None else (_arrays(each[0]), _arrays(each[1])) for each in kept]


def _arrays(value: Any) -> Any:
    """Tensors as arrays on the CPU; bf16, which NumPy does not know, as float32."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, list | tuple):
        return tuple(_arrays(each) for each in value)
    return value


def _join(parts: list[Any]) -> Any:
    """One array of all batches'. Further dimensions that differ are filled up with -100."""
    if not parts or parts[0] is None:
        return None
    if isinstance(parts[0], tuple):
        return tuple(_join([part[at] for part in parts]) for at in range(len(parts[0])))
    if not isinstance(parts[0], np.ndarray):
        return parts
    shape = tuple(max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True))
    if all(part.shape[1:] == shape for part in parts):
        return np.concatenate(parts)
    joined = np.full((sum(len(part) for part in parts), *shape), -100, dtype=parts[0].dtype)
    at = 0
    for part in parts:
        joined[(slice(at, at + len(part)), *(slice(size) for size in part.shape[1:]))] = part
        at += len(part)
    return joined
