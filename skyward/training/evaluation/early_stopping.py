"""Whether a metric that comes late still says that training should go on. Pure."""

from __future__ import annotations

from typing import Any

from .best import is_better, is_greater_better
from .records import EvaluationRecord

__all__ = ["EarlyStopping"]


class EarlyStopping:
    """Says to stop when a metric has not become better in `patience` evaluations in a row.

    Records that are late, skipped or failed count for nothing. NaN is never better.

    Args:
        patience: >= 1.
        threshold: how much better is better, >= 0.
    """

    def __init__(
        self, metric: str, *, patience: int, threshold: float = 0.0, greater_is_better: bool | None = None
    ) -> None:
        self._metric, self._patience, self._threshold = metric, patience, threshold
        self._is_greater = is_greater_better(metric) if greater_is_better is None else greater_is_better
        self._best: float | None = None
        self._worse = 0

    def observe(self, record: EvaluationRecord) -> bool:
        """True: stop."""
        value = record.metrics.get(self._metric, record.metrics.get(self._metric.removeprefix("eval_")))
        if record.status != "ok" or value is None:
            return False
        value = float(value)
        if is_better(value, self._best, is_greater=self._is_greater, by=self._threshold):
            self._best, self._worse = value, 0
        else:
            self._worse += 1
        return self._worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "worse": self._worse}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._best, self._worse = state_dict["best"], state_dict["worse"]
