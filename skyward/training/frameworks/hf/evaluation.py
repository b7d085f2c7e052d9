"""`SakuraHFCallback`: asynchronous evaluation for Hugging Face's `Trainer`.

It replaces the trainer's own evaluation (HF below) as follows:

- Cadence: at the end of each epoch, every N steps, or (`cadence="trainer"`) whenever the trainer would evaluate.
- Logs: results are in `state.log_history`, with names that begin with `eval_`. `on_log` and `on_evaluate` of the other
  callbacks are called with a state of the evaluated step. Integrations (TensorBoard, ...), `EarlyStoppingCallback` and
  our loggers see the result as if the trainer had evaluated.
- Best model: `state.best_metric` and `best_global_step` are those of the evaluated step. `load_best_model_at_end` loads
  that step's checkpoint, so one must have been saved.
- Schedules: `ReduceLROnPlateau` and `GreedyLR` step once for each result.
- End: the last evaluations are awaited at the end of the last epoch, before HF loads the best model.

HF passes a callback neither its trainer nor the other callbacks; as in `callbacks`, they are found on the stack.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ....errors import UsageError
from ...agree import Ranks
from ...evaluation.evaluator import AsyncEvaluator
from ...evaluation.pace import Drain
from ...evaluation.ranks import Evaluations
from ..evaluations import RunOptions, line_of, row_of, with_options
from ..foreign import load_framework, named, on_the_stack, plain

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback

    from ...evaluation import BestModel, EvaluationRecord
else:
    TrainerCallback = load_framework("transformers.trainer_callback", extra="transformers").TrainerCallback

_log = logging.getLogger(__name__)

_TRAININGS_OWN = ("loss", "grad_norm", "learning_rate")
"""Names that readers of `log_history` take for numbers of training."""


@with_options(RunOptions)
class SakuraHFCallback(TrainerCallback):  # type: ignore[misc]  # its base is Any to mypy here
    """Callback of transformers' `Trainer` that evaluates asynchronously while training goes on.

    It may be used for several runs, one after another. With several ranks, every rank has the callback; rank 0 sends
    the weights, and all ranks receive the results.

    Args:
        model_factory: makes the architecture that is trained; workers call it. For a PEFT model it must also load the
            same frozen weights, because only trained weights are sent.
        eval_fn: `(model, eval_payload) -> metrics`, a dict. Workers call it with the model in eval mode.
        eval_payload: data of `eval_fn`, such as a data set; sent to each worker once.
        val_compute: place of the evaluations. None: a thread of this process; "subprocess"; a pool, one of its nodes
            or roles; an AdaptiveCompute; or any Dispatcher.
        drain: "lazy" collects finished evaluations. "strict" also waits for the oldest before it sends the next.
        verbose: print a line for each result.
        cadence: "epoch": at the end of each epoch. A number: every that many optimizer steps, at least 1. "trainer":
            whenever the trainer would evaluate by its eval_strategy and eval_steps, in place of it.
        max_age_steps: steps that training may be ahead of a result. An older result is "late": it is logged, but does
            not change training. None: no limit.
        load: `(model, state) -> None` loads weights into the factory's model; None: `load_state_dict`.
        trainable_only: send only trained weights and buffers; "auto": for PEFT models.
        best: keeps the weights with the best score in a file.
        ranks: ranks of the run; None: those of torch's process group.
        **options: as for `AsyncEvaluator`: cache_key, fp16_state_dict, max_pending, on_backpressure, on_error, gate,
            timeout_s, timeline, async_copy and snapshots. With cache_key="auto" workers keep the model for this
            callback.

    Attributes:
        history: a row for each evaluation: its metrics, `epoch`, `elapsed_secs` (of the evaluation alone), `step`,
            `snapshot_id`, `submitted_at`, `started_at`, `finished_at`, `worker` and `status`. `skipped` is True for a
            skipped one.
        records: the same as `EvaluationRecord` objects.

    Raises:
        UsageError: a value is not legal.
        ArgumentNotPicklable: a factory or payload cannot be sent to a worker.

    Example:
        Evaluate each epoch in a subprocess::

            evaluation = SakuraHFCallback(
                model_factory=make_model, eval_fn=score, eval_payload=test, val_compute="subprocess"
            )
            transformers.Trainer(model, args, train_dataset=train, callbacks=[evaluation]).train()
            print(evaluation.history[-1])
    """

    __module__ = "skyward.training.sakura"

    def __init__(
        self,
        *,
        model_factory: Callable[[], Any],
        eval_fn: Callable[[Any, Any], Any],
        eval_payload: Any,
        val_compute: Any = None,
        drain: Drain = "lazy",
        verbose: bool = True,
        cadence: Literal["epoch", "trainer"] | int = "epoch",
        max_age_steps: int | None = None,
        load: Callable[[Any, Any], object] | None = None,
        trainable_only: bool | Literal["auto"] = "auto",
        best: BestModel | None = None,
        ranks: Ranks | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        if cadence not in ("epoch", "trainer") and (not isinstance(cadence, int) or cadence < 1):
            raise UsageError(
                f"cadence={cadence!r}: must be 'epoch', 'trainer' or a whole number of optimizer steps >= 1; set "
                "cadence='epoch' (the default)"
            )
        self._parts = (model_factory, eval_fn, eval_payload)
        self._options = {"compute": val_compute, "drain": drain, "load": load, "best": best, **options}
        self._cadence, self._trainable_only, self._ranks = cadence, trainable_only, ranks
        self._evaluations = Evaluations(
            type(self).__name__,
            missing="training has not begun; add the callback before train() is called",
            max_age_steps=max_age_steps,
            row=self._row,
            line=_line if verbose else None,
        )
        self.history, self.records = self._evaluations.history, self._evaluations.records
        self._handler: Any = None
        self._trainer: Any = None
        self._has_warned = False
        self._first: AsyncEvaluator | None = None
        self._first = self._evaluator()  # made now, so that illegal arguments raise here and not when training begins

    @property
    def pending(self) -> int:
        """Number of evaluations without a reported result."""
        return self._evaluations.pending

    def close(self) -> None:
        """Cancel open evaluations after a run that raised, of which HF does not notify callbacks. Idempotent."""
        self._evaluations.close()

    # HF's events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        self._meet(args)
        try:
            self._evaluations.open(self._evaluator, ranks=self._ranks, trainable_only=self._trainable_only)
        finally:
            self._close_first()  # ranks other than 0 do not use their evaluator

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._take_over(args, state, control, context)
        if isinstance(self._cadence, int) and state.global_step % self._cadence == 0:
            self._submit(state, context)
        return self._report(args, state, control, self._evaluations.poll(step=state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._take_over(args, state, control, context)
        if self._cadence == "epoch":
            self._submit(state, context)
        # HF loads the best model before it fires on_train_end, so the last results must be known now.
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        take = self._evaluations.drain if is_last else self._evaluations.poll
        return self._report(args, state, control, take(step=state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        try:
            return self._report(args, state, control, self._evaluations.drain(step=state.global_step))
        finally:
            self.close()

    # A user's --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._close_first()

    # Within ----------------------------------------------------------------------------------------------------------

    def _evaluator(self) -> AsyncEvaluator:
        first, self._first = self._first, None
        names = {"compute": "val_compute", "payload": "eval_payload"}
        return first or AsyncEvaluator(*self._parts, **self._options, argument_names=names)

    def _close_first(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.close()

    def _meet(self, args: Any) -> None:
        hf = sys.modules.get("transformers.trainer")
        if hf is not None:
            self._trainer = on_the_stack(hf.Trainer)
            self._handler = on_the_stack(hf.CallbackHandler)
        if self._handler is None:
            _log.warning(
                "%s was not called by a Trainer of transformers: results reach state.log_history, but no callbacks",
                type(self).__name__,
            )
        if self._cadence == "trainer" and args.save_strategy == "best":
            raise UsageError(
                "save_strategy='best': would save later weights than those that were scored; set save_strategy to the "
                "eval_strategy with load_best_model_at_end=True, or pass best=BestModel(...)"
            )

    def _take_over(self, args: Any, state: Any, control: Any, context: dict[str, Any]) -> None:
        if self._cadence == "trainer" and control.should_evaluate:
            control.should_evaluate = False
            self._submit(state, context)

    def _submit(self, state: Any, context: dict[str, Any]) -> None:
        # With FSDP 1, only the wrapper can gather the sharded parameters.
        model = getattr(self._trainer, "model_wrapped", None) or context.get("model")
        if model is not None:
            self._evaluations.submit(model, step=state.global_step, epoch=state.epoch)

    def _report(self, args: Any, state: Any, control: Any, records: list[EvaluationRecord]) -> Any:
        for record in records:
            metrics = named(record.metrics, "eval_")
            hidden = {name: value for name, value in self._row(record).items() if name not in _TRAININGS_OWN}
            state.log_history.append(_json({**hidden, **metrics}))
            if record.status in ("ok", "late"):
                control = self._tell(args, state, control, record, metrics)
        return control

    def _row(self, record: EvaluationRecord) -> dict[str, Any]:
        row = row_of(record)
        if self._cadence == "epoch" and record.epoch is not None:
            row["epoch"] = int(record.epoch)
        return row

    def _tell(self, args: Any, state: Any, control: Any, record: EvaluationRecord, metrics: dict[str, Any]) -> Any:
        """Notify the other callbacks as if the trainer had evaluated at that step. Flags of the current step stay."""
        if self._handler is None:
            return control
        then = copy.copy(state)
        then.global_step, then.epoch = record.step, record.epoch
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        logs = {**numbers, "epoch": record.epoch}
        control = self._handler.call_event("on_log", args, then, control, logs=logs)
        if record.status == "ok" and (self._cadence == "trainer" or args.eval_strategy == "no"):
            control = self._handler.call_event("on_evaluate", args, then, control, metrics=dict(logs))
            self._decide(args, state, record.step, numbers)
        return control

    def _decide(self, args: Any, state: Any, step: int, metrics: dict[str, float]) -> None:
        """Do what the trainer does with a metric: note the best one, and step schedules that wait for one."""
        if args.metric_for_best_model is None:
            return
        name = "eval_" + args.metric_for_best_model.removeprefix("eval_")
        if name not in metrics:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "metric_for_best_model: eval_fn returned %s, but not %s, so no model is the best",
                    ", ".join(metrics),
                    name,
                )
            return
        if _is_plateau(self._handler.lr_scheduler):
            self._handler.lr_scheduler.step(metrics[name])
        _note_best(args, state, step, metrics[name])


def _is_plateau(scheduler: Any) -> bool:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    greedy = getattr(sys.modules.get("transformers.optimization"), "GreedyLR", ReduceLROnPlateau)
    return isinstance(scheduler, ReduceLROnPlateau | greedy)


def _note_best(args: Any, state: Any, step: int, score: float) -> None:
    """Note the best metric as `Trainer._determine_best_metric` does, with the evaluated step."""
    if state.best_metric is None:  # set even if the score is NaN, which is never better
        state.best_metric = float("-inf") if args.greater_is_better else float("inf")
    is_better = score > state.best_metric if args.greater_is_better else score < state.best_metric
    if not is_better:
        return
    state.best_metric = score
    if args.save_strategy in ("steps", "epoch"):
        state.best_global_step = step
        folder = os.path.join(args.output_dir, f"checkpoint-{step}")
        if os.path.isdir(folder):
            state.best_model_checkpoint = folder


def _json(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that JSON can hold, because HF writes its history to every checkpoint."""
    kept = {}
    for name, value in values.items():
        number = plain(value)
        try:
            json.dumps(number)
        except (TypeError, ValueError):  # would break the next checkpoint; `history` of this callback keeps it
            continue
        kept[name] = number
    return kept


def _line(record: EvaluationRecord) -> str:
    epoch = "" if record.epoch is None else f", epoch {record.epoch:.3g}"
    return line_of(record, f"evaluation of step {record.step}{epoch}", record.metrics)
