"""Evaluation and prediction: every sample once, over all ranks, in the order of the data set."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..events import TrainerState
from .batches import MicroBatch
from .outputs import EvalPrediction
from .stream import Stream, is_map_style

__all__ = [
    "Evaluated",
    "Evaluator",
    "is_best",
    "loss_in",
    "named_in",
    "outputs_without_loss",
    "plain",
    "speed",
    "watched",
]

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


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates and predicts, and keeps the stream of the last data set: its workers may stay.

    Args:
        ranks: those that have batches of their own.
        make_stream: of a data set. Collective.
        share: makes rank 0's value that of all ranks, where only it has the data sets. Collective.
        count: how much a batch's mean loss counts.
        opened, stepped: called when a data set is begun, and after each of its batches.
    """

    args: TrainingArguments
    ranks: Ranks
    make_stream: Callable[[Any], Stream]
    share: Callable[[str], str]
    count: Callable[[MicroBatch], float | torch.Tensor]
    opened: Callable[[], None]
    stepped: Callable[[], None]
    loader: Any = field(init=False, default=None)
    """The loader of the data set that was evaluated last."""
    _kept: tuple[str, Stream] | None = field(init=False, default=None)  # of a data set that can be read again

    def evaluate(
        self,
        dataset: Any,
        prefix: str,
        *,
        model: nn.Module,
        step: Step,
        keeps: bool,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None,
    ) -> tuple[Evaluated, dict[str, Any]]:
        """Run `step` (-> loss, predictions, labels) on every batch, without gradients. Collective.

        keeps: keep predictions and labels. Returns: what was evaluated, and its metrics by prefixed names.
        """
        begun_at = time.monotonic()
        stream = self._stream_of(dataset)
        self.loader = stream.loader
        self.opened()
        with _evaluating(model), torch.no_grad():
            done = self._run(stream, step, keeps=keeps)
        metrics: dict[str, Any] = {}
        if compute_metrics is not None and done.predictions is not None and done.labels is not None:
            metrics.update(plain(compute_metrics(EvalPrediction(done.predictions, done.labels))))
        if done.loss is not None:
            metrics["loss"] = done.loss
        metrics = {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()
        }
        return done, metrics | speed(prefix, time.monotonic() - begun_at, samples=done.samples, steps=done.steps)

    def _stream_of(self, dataset: Any) -> Stream:
        key = self.share(str(id(dataset)) if is_map_style(dataset) else "")
        if not key:
            return self.make_stream(dataset)
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self.make_stream(dataset)
        return self._kept[1]

    def _run(self, stream: Stream, step: Step, *, keeps: bool) -> Evaluated:
        stream.open(0, skip=0)
        total: torch.Tensor | float = 0.0
        weight: torch.Tensor | float = 0.0
        samples = steps = 0
        has_loss = False
        kept: list[tuple[Any, Any] | None] = []
        moves_every = self.args.eval_accumulation_steps or 1
        while batches := stream.take(1):
            (batch,) = batches
            loss, predictions, labels = step(batch.inputs)
            if loss is not None and batch.samples:
                has_loss = True
                share = self.count(batch)
                total, weight = total + loss.detach().double() * share, weight + share
            samples += batch.samples
            steps += 1
            if keeps:
                kept.append((predictions, labels) if batch.samples else None)
                if steps % moves_every == 0:
                    kept[-moves_every:] = _moved(kept[-moves_every:])
            self.stepped()
        kept[steps - steps % moves_every :] = _moved(kept[steps - steps % moves_every :])
        parts = self.ranks.exchange((float(total), float(weight), samples, has_loss, kept))
        loss_sum, weight_sum = sum(part[0] for part in parts), sum(part[1] for part in parts)
        # Ranks hold neighbouring samples of a round: rounds in turn, and ranks within them, are the data set's order.
        ordered = [row for rows in zip(*(part[4] for part in parts), strict=True) for row in rows if row is not None]
        return Evaluated(
            loss=loss_sum / max(weight_sum, 1e-12) if any(part[3] for part in parts) else None,
            samples=sum(part[2] for part in parts),
            steps=steps,
            predictions=_join([row[0] for row in ordered]),
            labels=_join([row[1] for row in ordered]),
        )


def watched(args: TrainingArguments, metrics: Mapping[str, Any]) -> float:
    """The metric that the best model is chosen by. Raises: UsageError where it is missing."""
    name = str(args.metric_for_best_model)
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in metrics:
        raise UsageError(
            f"{type(args).__name__}.metric_for_best_model={name!r}: none of the metrics {', '.join(metrics)}"
        )
    return float(metrics[key])


def is_best(args: TrainingArguments, metrics: Mapping[str, Any], state: TrainerState) -> bool:
    """Keep the best metric in the state, as Hugging Face's does: callbacks that stop a run look at it."""
    if args.metric_for_best_model is None:
        return False
    value, is_greater = watched(args, metrics), args.greater_is_better
    if state.best_metric is None:  # not-a-number is never better, and the next metric must know that there was one
        state.best_metric = -math.inf if is_greater else math.inf
    is_better = value > state.best_metric if is_greater else value < state.best_metric
    if is_better:
        state.best_metric = value
        if args.save_strategy != "no":
            state.best_global_step = state.global_step
    return is_better


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
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
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value


def speed(prefix: str, runtime_s: float, *, samples: int, steps: int) -> dict[str, float]:
    """How long something took, as metrics."""
    seconds = max(runtime_s, 1e-9)
    return {
        f"{prefix}_runtime": round(runtime_s, 4),
        f"{prefix}_samples_per_second": round(samples / seconds, 3),
        f"{prefix}_steps_per_second": round(steps / seconds, 3),
    }


def _moved(kept: list[tuple[Any, Any] | None]) -> list[tuple[Any, Any] | None]:
    return [None if pair is None else (_arrays(pair[0]), _arrays(pair[1])) for pair in kept]


def _arrays(value: Any) -> Any:
    """Tensors as arrays on the CPU; bf16, which NumPy does not know, as float32."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, list | tuple):
        return tuple(_arrays(item) for item in value)
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
