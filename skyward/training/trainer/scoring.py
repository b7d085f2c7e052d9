"""How a Trainer evaluates and predicts, and which model is the best."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...errors import UsageError
from . import loss
from .evaluation import Evaluated, evaluate, evaluating, loss_in, outputs_without_loss, plain
from .objective import Objective
from .outputs import EvalPrediction, PredictionOutput
from .stream import Stream, is_map_style

__all__ = ["Scoring", "speed"]


class Scoring(Objective):
    """`evaluate` and `predict`, and the metric that the best model is chosen by."""

    def evaluate(self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """The metrics of a data set; of several by name, one after the other. Tells the callbacks."""
        self._begin()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping):
            found: dict[str, Any] = {}
            for name, each in dataset.items():
                found.update(self.evaluate(each, metric_key_prefix=f"{metric_key_prefix}_{name}"))
            return found
        only_loss = self.compute_metrics is None or self.args.prediction_loss_only
        _, metrics = self._evaluated(dataset, metric_key_prefix, keeps=not only_loss)
        self.log(metrics)
        self.control.should_evaluate = False
        self._fire("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Any, *, metric_key_prefix: str = "test") -> PredictionOutput:
        """The predictions of every sample, in order, on every rank; and metrics, where there are labels."""
        self._begin()
        done, metrics = self._evaluated(test_dataset, metric_key_prefix, keeps=not self.args.prediction_loss_only)
        self._fire("on_predict", metrics=metrics)
        self._agree()
        return PredictionOutput(done.predictions, done.labels, metrics)

    def _evaluate(self, *, is_scheduled: bool = True) -> dict[str, Any]:
        metrics = self.evaluate()
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and is_scheduled:
            self.lr_scheduler.step(self._watched(metrics))
        return metrics

    def _evaluated(self, dataset: Any, prefix: str, *, keeps: bool) -> tuple[Evaluated, dict[str, Any]]:
        begun_at = time.monotonic()
        stream = self._eval_stream(dataset)
        self._eval_loader, self._context = stream.loader, None
        with evaluating(self.model), torch.no_grad():
            done = evaluate(
                stream,
                step=lambda inputs: self.prediction_step(self.model, inputs, prediction_loss_only=not keeps),
                count=self._count,
                after_each=lambda: self._fire("on_prediction_step"),
                ranks=self._data_ranks,
                keeps=keeps,
                moves_every=self.args.eval_accumulation_steps or 1,
            )
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and done.predictions is not None and done.labels is not None:
            metrics.update(plain(self.compute_metrics(EvalPrediction(done.predictions, done.labels))))
        if done.loss is not None:
            metrics["loss"] = done.loss
        metrics = {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": each for name, each in metrics.items()
        }
        return done, metrics | speed(prefix, time.monotonic() - begun_at, samples=done.samples, steps=done.steps)

    def _eval_stream(self, dataset: Any) -> Stream:
        """Kept for data sets that can be read again: workers may stay."""
        key = str(id(dataset)) if is_map_style(dataset) else ""
        if self._is_read_by_one:
            key = self.ranks.share(key)  # making one is collective, and only rank 0 has a data set to decide by
        if not key:
            return self._make_stream(dataset, is_training=False)
        if key not in self._eval_streams:
            self._eval_streams = {key: self._make_stream(dataset, is_training=False)}
        return self._eval_streams[key]

    def prediction_step(
        self, model: nn.Module, inputs: Any, *, prediction_loss_only: bool
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """The loss, predictions and labels of a batch, each None where there is none. To be overridden."""
        inputs = loss.on_device(inputs, self.device)
        labels = loss.labels_of(inputs, self.args.label_names)
        is_overridden = type(self).compute_loss is not Objective.compute_loss
        with self._precision.autocast():
            if labels is not None or is_overridden:
                value, outputs = self.compute_loss(model, inputs, return_outputs=True)
            else:
                outputs = loss.call(model, inputs)
                value = loss_in(outputs)
        if prediction_loss_only:
            return value, None, None
        ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ("past_key_values",))
        predictions = outputs_without_loss(outputs, tuple(ignored))
        if self.preprocess_logits_for_metrics is not None:
            predictions = self.preprocess_logits_for_metrics(predictions, labels)
        return value, predictions, labels

    def _watched(self, metrics: Mapping[str, Any]) -> float:
        """The metric that the best model is chosen by."""
        name = str(self.args.metric_for_best_model)
        key = name if name.startswith("eval_") else f"eval_{name}"
        if key not in metrics:
            raise UsageError(
                f"{type(self.args).__name__}.metric_for_best_model={name!r}: none of the metrics {', '.join(metrics)}"
            )
        return float(metrics[key])

    def _is_best(self, metrics: Mapping[str, Any]) -> bool:
        """Keeps the best metric in the state, as Hugging Face's does: callbacks that stop a run look at it."""
        if self.args.metric_for_best_model is None:
            return False
        value, is_greater, state = self._watched(metrics), self.args.greater_is_better, self.state
        if state.best_metric is None:  # not-a-number is never better, and the next metric must know that there was one
            state.best_metric = -math.inf if is_greater else math.inf
        is_best = value > state.best_metric if is_greater else value < state.best_metric
        if is_best:
            state.best_metric = value
            if self.args.save_strategy != "no":
                state.best_global_step = state.global_step
        return is_best


def speed(prefix: str, runtime_s: float, *, samples: int, steps: int) -> dict[str, float]:
    """How long something took, as metrics."""
    seconds = max(runtime_s, 1e-9)
    return {
        f"{prefix}_runtime": round(runtime_s, 4),
        f"{prefix}_samples_per_second": round(samples / seconds, 3),
        f"{prefix}_steps_per_second": round(steps / seconds, 3),
    }
