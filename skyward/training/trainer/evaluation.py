"""Evaluation and prediction of every sample exactly once, over all ranks, in the order of the data set."""

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

Step = Callable[[Any], tuple[torch.Tensor | None, Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Result of an evaluation."""

    loss: float | None
    """Mean over all samples, or over all labels if each sample has several. None: the data has no labels."""
    samples: int
    steps: int
    predictions: Any = None
    """Predictions: (samples, ...) array, or a tuple of arrays. None: not kept."""
    labels: Any = None
    """Labels: (samples, ...) array, or a tuple of arrays. None: not kept."""


@dataclass(kw_only=True)
class Evaluator:
    """Evaluator of data sets. It keeps the stream of the last one, whose workers may persist.

    Args:
        args: settings of the run.
        ranks: ranks that have batches of their own.
        make_stream: makes the stream of a data set. Collective.
        share: returns rank 0's value on all ranks if only rank 0 has the data sets. Collective.
        count: returns the weight of a batch's mean loss.
        opened: called when a data set is opened.
        stepped: called after each batch.
    """

    args: TrainingArguments
    ranks: Ranks
    make_stream: Callable[[Any], Stream]
    share: Callable[[str], str]
    count: Callable[[MicroBatch], float | torch.Tensor]
    opened: Callable[[], None]
    stepped: Callable[[], None]
    loader: Any = field(init=False, default=None)
    """Data loader of the last data set."""
    _kept: tuple[str, Stream] | None = field(init=False, default=None)  # of a map-style data set

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
        """Run a step on every batch of a data set, without gradients. Collective.

        Args:
            dataset: the data set.
            prefix: prefix of the metrics' names.
            model: the model, which is in eval mode meanwhile.
            step: returns loss, predictions and labels of a batch.
            keeps: keep predictions and labels.
            compute_metrics: makes further metrics of predictions and labels.

        Returns:
            The result, and its metrics by prefixed names.
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
        # Ranks hold neighbouring samples of a round, so rounds in turn, and ranks within them, give the data's order.
        ordered = [row for rows in zip(*(part[4] for part in parts), strict=True) for row in rows if row is not None]
        return Evaluated(
            loss=loss_sum / max(weight_sum, 1e-12) if any(part[3] for part in parts) else None,
            samples=sum(part[2] for part in parts),
            steps=steps,
            predictions=_join([row[0] for row in ordered]),
            labels=_join([row[1] for row in ordered]),
        )


def watched(args: TrainingArguments, metrics: Mapping[str, Any]) -> float:
    """Return the metric that decides which model is best.

    Raises:
        UsageError: the evaluation has no such metric.
    """
    name = str(args.metric_for_best_model)
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in metrics:
        raise UsageError(
            f"{type(args).__name__}.metric_for_best_model={name!r}: the evaluation has no such metric; use one of "
            f"{', '.join(metrics)}"
        )
    return float(metrics[key])


def is_best(args: TrainingArguments, metrics: Mapping[str, Any], state: TrainerState) -> bool:
    """Return whether the metrics are the best so far; keep the best in the state, which stopping callbacks read."""
    if args.metric_for_best_model is None:
        return False
    value, is_greater = watched(args, metrics), args.greater_is_better
    if state.best_metric is None:  # set even if the value is NaN, so that None means: not evaluated yet
        state.best_metric = -math.inf if is_greater else math.inf
    is_better = value > state.best_metric if is_greater else value < state.best_metric
    if is_better:
        state.best_metric = value
        if args.save_strategy != "no":
            state.best_global_step = state.global_step
    return is_better


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch the model to eval mode; afterwards restore each module's mode, so that frozen ones stay frozen."""
    were_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in were_training:
            module.training = True


def loss_in(outputs: Any) -> torch.Tensor | None:
    """Return the loss in a model's outputs; None if there is none."""
    loss = named_in(outputs, "loss")
    return loss if isinstance(loss, torch.Tensor) and loss.ndim == 0 else None


def named_in(outputs: Any, name: str) -> Any:
    """Return the model's output of this name; without names, the first output or the only one."""
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    if hasattr(outputs, name):
        return getattr(outputs, name)
    return outputs[0] if isinstance(outputs, list | tuple) and outputs else outputs


def outputs_without_loss(outputs: Any, ignored: tuple[str, ...]) -> Any:
    """Return the predictions in a model's outputs: one tensor, a tuple of several, or None."""
    if isinstance(outputs, torch.Tensor):
        return outputs if outputs.ndim else None
    if isinstance(outputs, Mapping):
        predictions = tuple(value for key, value in outputs.items() if key not in ("loss", *ignored))
    elif isinstance(outputs, list | tuple):
        predictions = tuple(outputs[1:] if loss_in(outputs) is not None else outputs)
    else:
        return None
    return predictions[0] if len(predictions) == 1 else predictions or None


def plain(value: Any) -> Any:
    """Convert metrics to JSON types: numbers of numpy and torch become Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value


def speed(prefix: str, runtime_s: float, *, samples: int, steps: int) -> dict[str, float]:
    """Return runtime and speed as metrics."""
    seconds = max(runtime_s, 1e-9)
    return {
        f"{prefix}_runtime": round(runtime_s, 4),
        f"{prefix}_samples_per_second": round(samples / seconds, 3),
        f"{prefix}_steps_per_second": round(steps / seconds, 3),
    }


def _moved(kept: list[tuple[Any, Any] | None]) -> list[tuple[Any, Any] | None]:
    return [None if pair is None else (_arrays(pair[0]), _arrays(pair[1])) for pair in kept]


def _arrays(value: Any) -> Any:
    """Convert tensors to arrays on the CPU; bf16 to float32, because NumPy has no bf16."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, list | tuple):
        return tuple(_arrays(item) for item in value)
    return value


def _join(parts: list[Any]) -> Any:
    """Join the arrays of all batches. Where later dimensions differ, the gaps are filled with -100."""
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
