"""Evaluation beside training as a callback, for skyward's Trainer and for others through `training.frameworks`."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from ...errors import UsageError
from ..agree import Ranks
from ..events import TrainerCallback
from ..parts import part_of
from .best import EarlyStopping
from .evaluator import AsyncEvaluator
from .legal import check_names
from .ranks import Evaluations
from .records import EvaluationRecord

if TYPE_CHECKING:
    from ..bus import CallbackHandler

_log = logging.getLogger(__name__)


class AsyncEvaluation(TrainerCallback):
    """Score copies of the model beside training, and log the metrics at the step that was scored.

    Metrics go to `state.log_history`, with a leading "eval_", and to the run's callbacks as `on_log` and `on_evaluate`.
    These events carry a state whose `global_step` is the evaluated step; their model is the one in training, which has
    moved on. With several ranks they are fired at logs, at ends of epochs and at the end of training.

    Args:
        model_factory: as in `AsyncEvaluator`.
        eval_fn: as in `AsyncEvaluator`.
        payload: as in `AsyncEvaluator`.
        eval_strategy: when to evaluate, "epoch" or "steps".
        eval_steps: optimizer steps between evaluations, at least 1; None means the run's `eval_steps`.
        trainable_only: as in `model_state`.
        stop_on: metric for early stopping; None turns it off. Late metrics are ignored, see `max_age_steps`.
        patience: evaluations in a row without an improvement after which training stops, at least 1.
        threshold: smallest improvement that counts.
        greater_is_better: direction of the `stop_on` metric; None means by its name.
        drain_timeout_s: seconds after the last step after which open evaluations are cancelled; None waits for all.
        **options: any other option of `AsyncEvaluator`: compute, best, gate, on_backpressure, max_age_steps, ...

    Raises:
        UsageError: a value is out of its range, or an option is unknown.

    Example:
        >>> evaluation = AsyncEvaluation(
        ...     dict, lambda model, data: {"loss": 0.5}, eval_strategy="steps", eval_steps=100, compute="subprocess"
        ... )
        >>> evaluation.history
        []
    """

    collective_events = frozenset({"on_log", "on_epoch_end", "on_train_end"})

    def __init__(
        self,
        model_factory: Callable[[], Any],
        eval_fn: Callable[[Any, Any], Any],
        payload: Any = None,
        *,
        eval_strategy: Literal["epoch", "steps"] = "epoch",
        eval_steps: int | None = None,
        trainable_only: bool | Literal["auto"] = "auto",
        stop_on: str | None = None,
        patience: int = 3,
        threshold: float = 0.0,
        greater_is_better: bool | None = None,
        drain_timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        if eval_strategy not in ("epoch", "steps"):
            raise UsageError(
                f"AsyncEvaluation.eval_strategy={eval_strategy!r}: unknown strategy; use 'epoch' or 'steps'"
            )
        for field, value in (("eval_steps", eval_steps), ("patience", patience)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(
                    f"AsyncEvaluation.{field}={value!r}: must be a whole number >= 1; set {field}=1 or more"
                )
        check_names(type(self).__name__, options, inspect.signature(AsyncEvaluator).parameters)
        self._parts, self._options = (model_factory, eval_fn, payload), options
        self._strategy, self._eval_steps, self._trainable_only = eval_strategy, eval_steps, trainable_only
        self._drain_timeout_s = drain_timeout_s
        self._stopping = (
            None
            if stop_on is None
            else EarlyStopping(stop_on, patience=patience, threshold=threshold, greater_is_better=greater_is_better)
        )
        self._evaluations = Evaluations(type(self).__name__, has_collective_events=True)
        self._bus: CallbackHandler | None = None
        self._submitted_at: int | None = None
        self._is_reporting = False

    @property
    def evaluator(self) -> AsyncEvaluator | None:
        """Rank 0's evaluator while a run is on; None elsewhere."""
        return self._evaluations.evaluator

    @property
    def history(self) -> list[EvaluationRecord]:
        """All records so far, on every rank, including those from before a resume."""
        return self._evaluations.records

    @property
    def state_key(self) -> str:
        """Key of this callback's state in checkpoints; two of them in one run need different `name` options."""
        name = self._options.get("name")
        return "AsyncEvaluation" if name is None else f"AsyncEvaluation.{name}"

    def join_bus(self, bus: CallbackHandler) -> None:
        """Take the run's callbacks, which get the metrics."""
        self._bus = bus

    # Events ----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, state: Any, ranks: Ranks, trainer: Any = None, **kwargs: Any) -> None:
        if part_of(trainer) is not None:
            raise UsageError(
                f"AsyncEvaluation: {type(trainer).__name__} gives each rank one stage of the model, which cannot be "
                "evaluated alone; use the Trainer's own evaluations, eval_strategy='steps'"
            )
        self.close()
        self._submitted_at = None
        if state.global_step == 0:
            self._evaluations.records = []
        self._evaluations.open(
            lambda: AsyncEvaluator(*self._parts, **self._options), ranks=ranks, trainable_only=self._trainable_only
        )

    def on_step_end(self, state: Any, ranks: Ranks, control: Any, **kwargs: Any) -> None:
        if self._strategy == "steps" and state.global_step % self._every(state) == 0:
            self._submit(state, kwargs["model"])
        if ranks.world_size == 1:
            self._report(state, control, kwargs)

    def on_epoch_end(self, state: Any, control: Any, **kwargs: Any) -> None:
        if self._strategy == "epoch":
            self._submit(state, kwargs["model"])
        self._report(state, control, kwargs)

    def on_log(self, state: Any, ranks: Ranks, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if ranks.world_size > 1 and not self._is_reporting:
            self._report(state, control, kwargs)

    def on_train_end(self, state: Any, control: Any, **kwargs: Any) -> None:
        self._report(state, control, kwargs, is_last=True)
        self.close()

    def close(self) -> None:
        """Cancel open evaluations; also called when a run raises."""
        self._evaluations.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": [asdict(record) for record in self.history],
            "stopping": None if self._stopping is None else self._stopping.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._evaluations.records = [EvaluationRecord(**record) for record in state_dict["history"]]
        if self._stopping is not None and state_dict["stopping"] is not None:
            self._stopping.load_state_dict(state_dict["stopping"])

    # Internals -------------------------------------------------------------------------------------------------------

    def _every(self, state: Any) -> int:
        return self._eval_steps or max(1, int(state.eval_steps or 0))

    def _submit(self, state: Any, model: Any) -> None:
        if self._submitted_at != state.global_step and self._evaluations.is_open:
            self._submitted_at = state.global_step
            self._evaluations.submit(model, step=state.global_step, epoch=state.epoch)

    def _report(self, state: Any, control: Any, context: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Log the evaluations that ended since the last call, on all ranks."""
        evaluations, step = self._evaluations, state.global_step
        if not evaluations.pending:  # nothing open, or closed
            return
        records = (
            evaluations.drain(step=step, timeout_s=self._drain_timeout_s) if is_last else evaluations.poll(step=step)
        )
        for record in records:
            if record.metrics:
                self._log(record, state, control, context)
            if self._stopping is not None and self._stopping.observe(record) and not is_last:
                _log.info("training stops at step %d, because of the evaluation of step %d", step, record.step)
                control.should_training_stop = True

    def _log(self, record: EvaluationRecord, state: Any, control: Any, context: Mapping[str, Any]) -> None:
        metrics = {
            name if name.startswith("eval_") else f"eval_{name}": value for name, value in record.metrics.items()
        }
        logs = {**metrics, "epoch": record.epoch}
        state.log_history.append({**logs, "step": record.step})
        if self._bus is None:
            return
        then = copy.copy(state)
        then.global_step, then.epoch = record.step, record.epoch
        self._is_reporting = True  # our own on_log arrives here again, and must not report recursively
        try:
            self._bus.fire("on_log", control=control, **{**context, "state": then, "logs": logs})
            self._bus.fire("on_evaluate", control=control, **{**context, "state": then, "metrics": dict(logs)})
        finally:
            self._is_reporting = False
