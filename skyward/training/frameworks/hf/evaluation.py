"""`SakuraHFCallback`: evaluations beside Hugging Face's `Trainer`.

What HF's own evaluation does, and what is done about it here:

- When: at the end of each epoch, every so many steps, or (`cadence="trainer"`) whenever the trainer would evaluate,
  in place of that.
- Logs: what came of an evaluation is in `state.log_history`, and `on_log` and `on_evaluate` of the other callbacks are
  called for it, with a state that says the evaluated step. So integrations (TensorBoard, ...), `EarlyStoppingCallback`
  and our own loggers get it as if the trainer had evaluated. Names of metrics begin with `eval_` there.
- Best model: `state.best_metric` and `best_global_step` are those of the evaluated step, so `load_best_model_at_end`
  loads the checkpoint that has the weights that were scored: one of that same step must have been saved.
- `ReduceLROnPlateau` and `GreedyLR` step once for each result.
- The last evaluations are waited for when the last epoch ends, which is before HF loads the best model.
- HF gives a callback neither its trainer nor the other callbacks; as in `callbacks`, they are found on the stack.
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
from ...evaluation.evaluator import AsyncEvaluator, Drain
from ...evaluation.ranks import Evaluations
from ..evaluations import RunOptions, line_of, row_of, with_options
from ..foreign import load_framework, named, on_the_stack, plain

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback

    from ...evaluation import BestModel, EvaluationRecord
else:
    TrainerCallback = load_framework("transformers.trainer_callback", extra="transformers").TrainerCallback

__all__ = ["SakuraHFCallback"]

_log = logging.getLogger(__name__)

_TRAININGS_OWN = ("loss", "grad_norm", "learning_rate")
"""Names that mean training's own numbers to those who read `log_history`."""


@with_options(RunOptions)
class SakuraHFCallback(TrainerCallback):  # type: ignore[misc]  # its base is Any to mypy here
    """A callback of transformers' `Trainer` that evaluates beside training.

    All arguments are keywords. It is used for one run at a time, and may be used for several, one after another.

    model_factory: makes the architecture that is trained; called by a worker. Of a PEFT model, with the same frozen
        weights: only what is trained travels.
    eval_fn: (model, eval_payload) -> metrics, a dictionary. Called by a worker, its model in evaluation mode.
    eval_payload: what it needs, such as a dataset; sent to a worker once.
    val_compute: where evaluations run. None: a thread here; "subprocess"; a pool, a node or role of it;
        an AdaptiveCompute; any Dispatcher.
    drain: "lazy" collects what has ended; "strict" also waits for the oldest before it sends the next.
    verbose: a line on standard output for each result.
    cadence: "epoch": at the end of each; a number: every so many optimizer steps; "trainer": when the trainer would
        evaluate (its eval_strategy and eval_steps), in place of that.
    max_age_steps: results that come when training is more steps ahead are "late": logged, but they decide nothing.
        None: no limit.
    load: (model, state) -> None, puts weights into the factory's model; None: as state dicts are loaded.
    trainable_only: whether only what is trained travels, and buffers; "auto": for PEFT's models.
    best: keeps the best weights that were scored in a file.
    ranks: of the run; None: those of torch's process group.
    options: cache_key, fp16_state_dict, max_pending, on_backpressure, on_error, gate, timeout_s, timeline, async_copy
        and snapshots, as `AsyncEvaluator` has them. cache_key="auto": a worker keeps the model for this callback.

    `history`: a row for each evaluation: its metrics, `epoch`, `elapsed_secs` (of the evaluation alone), `step`,
    `snapshot_id`, `submitted_at`, `started_at`, `finished_at`, `worker`, `status`; `skipped` True where it was.
    `records`: the same as EvaluationRecords. `pending`: how many are under way.

    With several ranks every one has this callback; rank 0 sends, and all know the results.
    Raises: UsageError for what is not legal, ArgumentNotPicklable when a factory or payload cannot travel.
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
            raise UsageError(f"cadence: {cadence!r}; it is 'epoch', 'trainer', or a number of optimizer steps, >= 1")
        self._parts = (model_factory, eval_fn, eval_payload)
        self._options = {"compute": val_compute, "drain": drain, "load": load, "best": best, **options}
        self._cadence, self._trainable_only, self._ranks = cadence, trainable_only, ranks
        self._evaluations = Evaluations(
            type(self).__name__,
            missing="training has not begun; add it before train() is called",
            max_age_steps=max_age_steps,
            row=self._row,
            line=_line if verbose else None,
        )
        self.history, self.records = self._evaluations.history, self._evaluations.records
        self._handler: Any = None
        self._trainer: Any = None
        self._has_warned = False
        self._first: AsyncEvaluator | None = None
        self._first = self._evaluator()  # what is wrong with arguments is said here

    @property
    def pending(self) -> int:
        """Evaluations that have been asked for, and not been told of yet."""
        return self._evaluations.pending

    def close(self) -> None:
        """End what this object has started, in a run that raised: HF tells its callbacks nothing of it. Idempotent."""
        self._evaluations.close()

    # HF's events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        self._meet(args)
        try:
            self._evaluations.open(self._evaluator, ranks=self._ranks, trainable_only=self._trainable_only)
        finally:
            self._close_first()  # on ranks that have no evaluator

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._take_over(args, state, control, context)
        if isinstance(self._cadence, int) and state.global_step % self._cadence == 0:
            self._submit(state, context)
        return self._report(args, state, control, self._evaluations.poll(step=state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._take_over(args, state, control, context)
        if self._cadence == "epoch":
            self._submit(state, context)
        # HF loads the best model before it says that training has ended; its last checkpoint is still to come.
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
                "%s was not called by a Trainer of transformers: what comes of evaluations reaches state.log_history, "
                "and no other callbacks",
                type(self).__name__,
            )
        if self._cadence == "trainer" and args.save_strategy == "best":
            raise UsageError(
                "save_strategy='best' saves the weights that are there when a score comes, which are later ones; use "
                "the same save_strategy as eval_strategy with load_best_model_at_end=True, or best=BestModel(...)"
            )

    def _take_over(self, args: Any, state: Any, control: Any, context: dict[str, Any]) -> None:
        if self._cadence == "trainer" and control.should_evaluate:
            control.should_evaluate = False
            self._submit(state, context)

    def _submit(self, state: Any, context: dict[str, Any]) -> None:
        # Where parameters are sharded by FSDP 1, only the wrapper can gather them.
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
        """The other callbacks, as if the trainer had evaluated at that step. Flags for the current step stay."""
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
        """What the trainer does by a metric itself: the best one, and schedulers that wait for one."""
        if args.metric_for_best_model is None:
            return
        name = "eval_" + args.metric_for_best_model.removeprefix("eval_")
        if name not in metrics:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "metric_for_best_model: eval_fn gives no %s, but %s: nothing is best", name, ", ".join(metrics)
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
    """As `Trainer._determine_best_metric` does, of the evaluated step."""
    if state.best_metric is None:  # not-a-number is never better
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
    """Those that JSON can hold: HF writes its history to every checkpoint."""
    kept = {}
    for name, value in values.items():
        number = plain(value)
        try:
            json.dumps(number)
        except (TypeError, ValueError):  # it stays in `history`, and would break the next checkpoint
            continue
        kept[name] = number
    return kept


def _line(record: EvaluationRecord) -> str:
    epoch = "" if record.epoch is None else f", epoch {record.epoch:.3g}"
    return line_of(record, f"evaluation of step {record.step}{epoch}", record.metrics)
