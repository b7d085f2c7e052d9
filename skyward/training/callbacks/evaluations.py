"""Deduplication of evaluations that a framework reports twice.

Hugging Face's Trainer reports each evaluation in `on_log` and again in `on_evaluate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EVERYWHERE = frozenset({"epoch", "step"})
"""Keys that say when a report was made. Two different reports may share them, so they never make a report known."""


class ReportedOnce:
    """Values that one logger has seen at the current step, from either event.

    Several evaluations at one step (of several data sets) stay separate: the same metric with another value is new.
    """

    def __init__(self) -> None:
        self._step = -1
        self._logs: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}

    def logged(self, step: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the new values of on_log's `logs`; empty if there are none."""
        self._at(step)
        news = _news(logs, self._metrics)
        self._logs.update(logs)
        return news

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the new values of on_evaluate's `metrics`; empty if there are none."""
        self._at(step)
        news = _news(metrics, self._logs)
        self._metrics.update(metrics)
        return news

    def _at(self, step: int) -> None:
        if step != self._step:
            self._step, self._logs, self._metrics = step, {}, {}


def _news(reported: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    new = {key: value for key, value in reported.items() if key in _EVERYWHERE or not _is_known(key, value, known)}
    return {} if new.keys() <= _EVERYWHERE else new


def _is_known(key: str, value: Any, known: Mapping[str, Any]) -> bool:
    return key in known and (known[key] is value or repr(known[key]) == repr(value))
