"""Ends a run whose loss has left its best value for good, or is no number any more."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from ...errors import UsageError
from ..agree import Ranks
from ..events import TrainerCallback
from .evaluations import ReportedOnce

__all__ = ["DivergenceDetector"]

_log = logging.getLogger(__name__)

_STATE = ("smoothed_loss", "best_smoothed_loss", "observation_count", "consecutive_above")


class DivergenceDetector(TrainerCallback):
    """Compares the smoothed loss with the best that it has been.

    It acts when the smoothed loss is `threshold` or more above its best, or `relative_threshold` times its best or
    more, for `patience` observations in a row, after the first `warmup` of them. NaN and infinity it acts on at once.
    Ranks see losses of their own; they decide together, by the mean, and have one state.

    smoothing: weight of a new loss in the exponential moving average, in (0, 1]; 1 is no smoothing.
    threshold, relative_threshold: above 0, and above 1; None: not looked at. At least one is given.
    action: "stop" saves a checkpoint and ends the run; "abort" ends it without.
    use_eval_loss: watches `eval_loss` of evaluations instead of `loss` of logs.
    metric_key: what to watch instead, in logs and in evaluations.

    Stateful: smoothed_loss, best_smoothed_loss, observation_count, consecutive_above.
    Raises: UsageError for values out of these ranges.
    """

    def __init__(
        self,
        smoothing: float = 0.3,
        threshold: float | None = 1.0,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        action: Literal["stop", "abort"] = "stop",
        use_eval_loss: bool = False,
        metric_key: str | None = None,
    ) -> None:
        _check("smoothing", smoothing, "above 0 and at most 1", 0 < smoothing <= 1)
        _check("threshold", threshold, "above 0, or None", _is_none_or_above(threshold, 0))
        _check(
            "relative_threshold",
            relative_threshold,
            "above 1, or None",
            relative_threshold is None or relative_threshold > 1,
        )
        _check("threshold", None, "given, or relative_threshold is", (threshold, relative_threshold) != (None, None))
        _check("patience", patience, "at least 1", patience >= 1)
        _check("warmup", warmup, "at least 0", warmup >= 0)
        _check("action", action, "'stop' or 'abort'", action in {"stop", "abort"})
        self.smoothing, self.patience, self.warmup = smoothing, patience, warmup
        self.threshold, self.relative_threshold = threshold, relative_threshold
        self.action = action
        self.metric_key = metric_key or ("eval_loss" if use_eval_loss else "loss")
        # Hugging Face's Trainer tells evaluations to both: only a key of the user's own is looked for in both.
        own, event = metric_key is not None, "on_evaluate" if use_eval_loss else "on_log"
        self.collective_events = frozenset({"on_log", "on_evaluate"} if own else {event})
        self.smoothed_loss: float | None = None
        self.best_smoothed_loss: float | None = None
        self.observation_count = 0
        self.consecutive_above = 0
        self._reported = ReportedOnce()
        self._has_acted = False

    def on_train_begin(self, **kwargs: Any) -> None:
        self._reported = ReportedOnce()
        self._has_acted = False

    def on_log(self, state: Any, control: Any, logs: Mapping[str, Any], ranks: Ranks, **kwargs: Any) -> None:
        if "on_log" in self.collective_events:
            self._watch(state, control, self._reported.logged(state.global_step, logs), ranks)

    def on_evaluate(
        self, state: Any, control: Any, ranks: Ranks, metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if "on_evaluate" in self.collective_events:
            self._watch(state, control, self._reported.evaluated(state.global_step, metrics or {}), ranks)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        for name in _STATE:
            setattr(self, name, state_dict[name])

    def _watch(self, state: Any, control: Any, told: Mapping[str, Any], ranks: Ranks) -> None:
        mine = told.get(self.metric_key)
        losses = [each for each in ranks.exchange(None if mine is None else float(mine)) if each is not None]
        if not losses:
            return
        loss = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
        reason = self._observe(loss)
        if reason is None:
            return
        if not self._has_acted and ranks.rank == 0:
            _log.error("%s at step %d; action: %s", reason, state.global_step, self.action)
        self._has_acted = True
        self._act(control)

    def _observe(self, loss: float) -> str | None:
        """Counts a loss. Gives the reason to act."""
        if math.isnan(loss):
            return f"training diverges: {self.metric_key} is not finite"
        self.observation_count += 1
        if self.smoothed_loss is None or self.best_smoothed_loss is None:
            self.smoothed_loss = self.best_smoothed_loss = loss
            return None
        self.smoothed_loss += self.smoothing * (loss - self.smoothed_loss)
        self.best_smoothed_loss = min(self.best_smoothed_loss, self.smoothed_loss)
        if self.observation_count <= self.warmup:
            return None
        self.consecutive_above = self.consecutive_above + 1 if self._is_above() else 0
        if self.consecutive_above < self.patience:
            return None
        return (
            f"training diverges: smoothed {self.metric_key} is {self.smoothed_loss:.4g}, its best was "
            f"{self.best_smoothed_loss:.4g}, {self.consecutive_above} observations in a row"
        )

    def _is_above(self) -> bool:
        assert self.smoothed_loss is not None
        assert self.best_smoothed_loss is not None
        best, now = self.best_smoothed_loss, self.smoothed_loss
        if self.threshold is not None and now - best >= self.threshold:
            return True
        # A multiple of what is not above 0 says nothing.
        return self.relative_threshold is not None and 0 < best * self.relative_threshold <= now

    def _act(self, control: Any) -> None:
        """Flag by flag: the control may be another framework's. Its trainer need not save when it stops."""
        control.should_training_stop = True
        if self.action == "abort":
            control.should_abort_without_save = True
            control.should_save = control.should_evaluate = False
        else:
            control.should_save = True


def _check(field: str, value: object, legal: str, is_legal: bool) -> None:
    if not is_legal:
        raise UsageError(f"DivergenceDetector: {field} is {value!r}; it must be {legal}")


def _is_none_or_above(value: float | None, low: float) -> bool:
    return value is None or value > low
