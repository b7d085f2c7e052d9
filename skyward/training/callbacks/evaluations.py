"""Evaluations that a framework reports twice, once: Hugging Face's Trainer tells them by on_log and on_evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ReportedOnce"]

_EVERYWHERE = frozenset({"epoch", "step"})
"""What a report says of when it was made: two reports have these in common and are two all the same."""


class ReportedOnce:
    """What one logger has been told at the current step, whichever event came first.

    Several evaluations at one step (of several data sets) are several. The same metric with another value is news.
    """

    def __init__(self) -> None:
        self._step = -1
        self._logs: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}

    def logged(self, step: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        """What of on_log's `logs` is new. Empty: nothing."""
        self._at(step)
        news = _news(logs, self._metrics)
        self._logs.update(logs)
        return news

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """What of on_evaluate's `metrics` is new. Empty: nothing."""
        self._at(step)
        news = _news(metrics, self._logs)
        self._metrics.update(metrics)
        return news

    def _at(self, step: int) -> None:
        if step != self._step:
            self._step, self._logs, self._metrics = step, {}, {}


def _news(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    new = {key: value for key, value in told.items() if key in _EVERYWHERE or not _is_known(key, value, known)}
    return {} if new.keys() <= _EVERYWHERE else new


def _is_known(key: str, value: Any, known: Mapping[str, Any]) -> bool:
    return key in known and (known[key] is value or repr(known[key]) == repr(value))
