"""Results of `train` and `predict`, and the argument of `compute_metrics`."""

from __future__ import annotations

from typing import Any, NamedTuple


class TrainOutput(NamedTuple):
    """Result of `Trainer.train`.

    Example:
        >>> from skyward.training import TrainOutput
        >>> TrainOutput(global_step=100, training_loss=0.5, metrics={"train_runtime": 12.0}).training_loss
        0.5
    """

    global_step: int
    """Optimizer steps of the run, including those before a resume."""
    training_loss: float
    """Mean loss over all steps of the run, including those before a resume."""
    metrics: dict[str, float]
    """Runtime in seconds, speed, operations and loss, by names such as "train_runtime"."""


class EvalPrediction(NamedTuple):
    """Predictions and labels of all samples, in the order of the data set. Argument of `compute_metrics`.

    Example:
        >>> import numpy as np
        >>> from skyward.training import EvalPrediction
        >>> def accuracy(result):
        ...     return {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())}
        >>> accuracy(EvalPrediction(np.eye(2), np.array([0, 1])))
        {'accuracy': 1.0}
    """

    predictions: Any
    """Predictions: (N, ...) array, or a tuple of arrays if the model returns several."""
    label_ids: Any
    """Labels: (N, ...) array, or a tuple of arrays if `label_names` names several."""


class PredictionOutput(NamedTuple):
    """Result of `Trainer.predict`.

    Example:
        >>> from skyward.training import PredictionOutput
        >>> PredictionOutput(predictions=[0.9], label_ids=None, metrics={"test_runtime": 0.1}).predictions
        [0.9]
    """

    predictions: Any
    """Predictions of all samples: (N, ...) array, or a tuple of arrays."""
    label_ids: Any
    """Labels of all samples: (N, ...) array, or a tuple of arrays. None: the data has no labels."""
    metrics: dict[str, float]
    """Loss (if there are labels), runtime in seconds and speed, by names such as "test_loss"."""
