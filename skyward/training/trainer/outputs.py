"""What `train` and `predict` give, and what `compute_metrics` is given."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["EvalPrediction", "PredictionOutput", "TrainOutput"]


class TrainOutput(NamedTuple):
    """training_loss: the mean over all steps of the run, those before a resume too."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalPrediction(NamedTuple):
    """Of all samples, in the order of the data set; arrays (N, ...), or tuples of them where a model gives several."""

    predictions: Any
    label_ids: Any


class PredictionOutput(NamedTuple):
    """As `EvalPrediction`, with the metrics; label_ids is None where the data has no labels."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
