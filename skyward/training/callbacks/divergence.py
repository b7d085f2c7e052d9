"""Stop a run whose loss diverges or becomes NaN."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from ...errors import UsageError
from ..agree import Ranks
from ..events import TrainerCallback
from .evaluations import ReportedOnce

_log = logging.getLogger(__name__)

_STATE = ("smoothed_loss", "best_smoothed_loss", "observation_count", "consecutive_above")


class DivergenceDetector(TrainerCallback):
    """Stop training when the smoothed loss stays far above its best value.

    The callback acts when the smoothed loss exceeds its best by `threshold`, or reaches `relative_threshold` times its
    best, for `patience` observations in a row after the first `warmup`. It acts on NaN and infinity at once. In a
    distributed run the ranks average their losses first, so they decide together and share one state.

    The state (`smoothed_loss`, `best_smoothed_loss`, `observation_count`, `consecutive_above`) is saved in checkpoints.

    Args:
        smoothing: weight of a new loss in the exponential moving average, in (0, 1]; 1 turns smoothing off.
        threshold: absolute distance to the best loss, above 0; None turns the check off.
        relative_threshold: multiple of the best loss, above 1; None turns the check off. One of the two is required.
        patience: observations in a row above a threshold, at least 1.
        warmup: first observations that never count, at least 0.
        action: "stop" saves a checkpoint and ends the run; "abort" ends it without saving.
        use_eval_loss: watch `eval_loss` of evaluations instead of `loss` of logs.
        metric_key: another metric to watch, in logs and in evaluations.

    Raises:
        UsageError: a value is out of its range.

    Example:
        >>> detector = DivergenceDetector(threshold=2.0, patience=5, action="abort")
        >>> detector.metric_key
        'loss'
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
        _check("smoothing", smoothing, 0 < smoothing <= 1, "must be above 0 and at most 1", "set 1 for no smoothing")
        _check("threshold", threshold, threshold is None or threshold > 0, "must be above 0", "set None to turn it off")
        _check(
            "relative_threshold",
            relative_threshold,
            relative_threshold is None or relative_threshold > 1,
            "must be above 1",
            "set None to turn it off",
        )
        _check(
            "threshold",
            None,
            (threshold, relative_threshold) != (None, None),
            "nothing to compare with",
            "set threshold or relative_threshold",
        )
        _check("patience", patience, patience >= 1, "must be at least 1", "set patience=1 or more")
        _check("warmup", warmup, warmup >= 0, "must be at least 0", "set warmup=0 or more")
        _check("action", action, action in {"stop", "abort"}, "unknown action", "use 'stop' or 'abort'")
        self.smoothing, self.patience, self.warmup = smoothing, patience, warmup
        self.threshold, self.relative_threshold = threshold, relative_threshold
        self.action = action
        self.metric_key = metric_key or ("eval_loss" if use_eval_loss else "loss")
        # Hugging Face's Trainer reports an evaluation in on_log and in on_evaluate. One event is enough for the
        # built-in keys; only a key of the user's own may come in either, so only that one is looked for in both.
        is_custom, event = metric_key is not None, "on_evaluate" if use_eval_loss else "on_log"
        self.collective_events = frozenset({"on_log", "on_evaluate"} if is_custom else {event})
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

    def _watch(self, state: Any, control: Any, metrics: Mapping[str, Any], ranks: Ranks) -> None:
        # Every rank takes part in the exchange, also one without the metric: a rank that returned before it would
        # leave the others waiting.
        own_loss = metrics.get(self.metric_key)
        exchanged = ranks.exchange(None if own_loss is None else float(own_loss))
        losses = [loss for loss in exchanged if loss is not None]
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
        """Count a loss and return the reason to act, or None."""
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
            f"training diverges: smoothed {self.metric_key} is {self.smoothed_loss:.4g}, its best is "
            f"{self.best_smoothed_loss:.4g}, {self.consecutive_above} observations in a row"
        )

    def _is_above(self) -> bool:
        assert self.smoothed_loss is not None
        assert self.best_smoothed_loss is not None
        best, now = self.best_smoothed_loss, self.smoothed_loss
        if self.threshold is not None and now - best >= self.threshold:
            return True
        # A multiple of a loss at or below 0 is not above it, so it means nothing.
        return self.relative_threshold is not None and 0 < best * self.relative_threshold <= now

    def _act(self, control: Any) -> None:
        """Set single flags, because `control` may be another framework's, whose trainer does not save on a stop."""
        control.should_training_stop = True
        if self.action == "abort":
            control.should_abort_without_save = True
            control.should_save = control.should_evaluate = False
        else:
            control.should_save = True


def _check(field: str, value: object, is_legal: bool, problem: str, advice: str) -> None:
    if not is_legal:
        raise UsageError(f"DivergenceDetector.{field}={value!r}: {problem}; {advice}")
