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
from typing import TYPE_CHECKING, Any, Literal

from ....errors import UsageError
from ...agree import Ranks
from ...callbacks.lines import write_line
from ..evaluations import Beside, EvaluatorOptions, line_of, row_of
from ..model import class_at_first_use, load_framework, plain
from .callbacks import on_the_stack

if TYPE_CHECKING:
    from ...evaluation import AsyncEvaluator, BestModel, EvaluationRecord, Timeline
    from ...snapshot import SnapshotPool

__all__ = ["SakuraHF", "SakuraHFCallback"]

_log = logging.getLogger(__name__)

_TRAININGS_OWN = ("loss", "grad_norm", "learning_rate")
"""Names that mean training's own numbers to those who read `log_history`."""


class SakuraHF(Beside):
    """What `SakuraHFCallback` is but for HF's base class, so that nothing is imported here."""

    _is_missing = "training has not begun; add it before train() is called"

    def __init__(  # noqa: PLR0913  # keyword-only options
        self,
        *,
        model_factory: Callable[[], Any],
        eval_fn: Callable[[Any, Any], Any],
        eval_payload: Any,
        val_compute: Any = None,
        drain: Literal["lazy", "strict"] = "lazy",
        cache_key: str | None = "auto",
        fp16_state_dict: bool = False,
        max_pending: int = 4,
        on_backpressure: Literal["skip", "queue", "block"] = "skip",
        async_copy: bool = True,
        verbose: bool = True,
        cadence: Literal["epoch", "trainer"] | int = "epoch",
        on_error: Literal["record", "raise"] = "record",
        gate: Literal["auto", "always", "sync"] = "auto",
        timeout_s: float | None = None,
        max_age_steps: int | None = None,
        load: Callable[[Any, Any], object] | None = None,
        trainable_only: bool | Literal["auto"] = "auto",
        snapshots: SnapshotPool | None = None,
        best: BestModel | None = None,
        timeline: Timeline | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if cadence not in ("epoch", "trainer") and (not isinstance(cadence, int) or cadence < 1):
            raise UsageError(f"cadence: {cadence!r}; it is 'epoch', 'trainer', or a number of optimizer steps, >= 1")
        options = EvaluatorOptions(
            val_compute=val_compute,
            drain=drain,
            cache_key=cache_key,
            fp16_state_dict=fp16_state_dict,
            max_pending=max_pending,
            on_backpressure=on_backpressure,
            async_copy=async_copy,
            on_error=on_error,
            gate=gate,
            timeout_s=timeout_s,
            snapshots=snapshots,
            timeline=timeline,
        )
        super().__init__(options, max_age_steps=max_age_steps, ranks=ranks)
        self._parts, self._more = (model_factory, eval_fn, eval_payload), {"load": load, "best": best}
        self._cadence, self._verbose, self._trainable_only = cadence, verbose, trainable_only
        self._handler: Any = None
        self._trainer: Any = None
        self._is_rank_0, self._has_warned = True, False
        self._first: AsyncEvaluator | None = None
        self._first = self._evaluator()  # what is wrong with arguments is said here

    # HF's events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        self._meet(args)
        ranks = self._ranks_of_run()
        self._is_rank_0 = ranks.rank == 0
        self.close()
        if not self._is_rank_0 and self._first is not None:
            self._first.close()
            self._first = None
        self._open(self._evaluator, ranks, trainable_only=self._trainable_only)

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._take_over(args, state, control, context)
        if isinstance(self._cadence, int) and state.global_step % self._cadence == 0:
            self._submit(state, context)
        return self._report(args, state, control, self._met.poll(step=state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._take_over(args, state, control, context)
        if self._cadence == "epoch":
            self._submit(state, context)
        # HF loads the best model before it says that training has ended; its last checkpoint is still to come.
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        step = state.global_step
        return self._report(args, state, control, self._met.drain(step=step) if is_last else self._met.poll(step=step))

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        try:
            return self._report(args, state, control, self._met.drain(step=state.global_step))
        finally:
            self.close()

    # A user's --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._first is not None:
            self._first.close()

    # Within ----------------------------------------------------------------------------------------------------------

    def _evaluator(self) -> AsyncEvaluator:
        first, self._first = self._first, None
        names = {"payload": "eval_payload"}
        return first or self._options.evaluator(*self._parts, **self._more, argument_names=names)

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
            self._met.submit(model, step=state.global_step, epoch=state.epoch)

    def _report(self, args: Any, state: Any, control: Any, records: list[EvaluationRecord]) -> Any:
        for record in records:
            self.records.append(record)
            row = self._row(record)
            self.history.append(row)
            named = {_eval_name(name): value for name, value in record.metrics.items()}
            hidden = {name: row[name] for name in row if name not in _TRAININGS_OWN}
            state.log_history.append(_json({**hidden, **named}))
            if self._verbose and self._is_rank_0:
                write_line(_line(record))
            if record.status in ("ok", "late"):
                control = self._tell(args, state, control, record, named)
        return control

    def _row(self, record: EvaluationRecord) -> dict[str, Any]:
        row = row_of(record)
        if self._cadence == "epoch" and record.epoch is not None:
            row["epoch"] = int(record.epoch)
        return row

    def _tell(self, args: Any, state: Any, control: Any, record: EvaluationRecord, named: dict[str, Any]) -> Any:
        """The other callbacks, as if the trainer had evaluated at that step. Flags for the current step stay."""
        if self._handler is None:
            return control
        then = copy.copy(state)
        then.global_step, then.epoch = record.step, record.epoch
        numbers = {name: value for name, value in _json(named).items() if isinstance(value, int | float)}
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
        name = _eval_name(args.metric_for_best_model)
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


def _eval_name(name: str) -> str:
    return name if name.startswith("eval_") else f"eval_{name}"


def _json(values: dict[str, Any]) -> dict[str, Any]:
    """Those that JSON can hold: HF writes its history to every checkpoint."""
    kept = {}
    for name, value in values.items():
        number = plain(value)
        try:
            json.dumps(number)
        except (TypeError, ValueError):
            continue
        kept[name] = number
    return kept


def _line(record: EvaluationRecord) -> str:
    epoch = "" if record.epoch is None else f", epoch {record.epoch:.3g}"
    return line_of(record, f"evaluation of step {record.step}{epoch}", _json(record.metrics))


SAKURAHFCALLBACK_DOC = """A callback of transformers' `Trainer` that evaluates beside training.

    All arguments are keywords. It is used for one run at a time, and may be used for several, one after another.

    model_factory: makes the architecture that is trained; called by a worker. Of a PEFT model, with the same frozen
        weights: only what is trained travels.
    eval_fn: (model, eval_payload) -> metrics, a dictionary. Called by a worker, its model in evaluation mode.
    eval_payload: what it needs, such as a dataset; sent to a worker once.
    val_compute: where evaluations run. None: a thread here; "subprocess"; a pool, a node or role of it;
        an AdaptiveCompute; any Dispatcher.
    drain: "lazy" collects what has ended; "strict" also waits for the oldest before it sends the next.
    cache_key: "auto": a worker keeps the model for this callback's evaluations; a name of yours: for all that have
        the same; None: it is made anew each time.
    fp16_state_dict: float32 weights travel as float16, in the background, and are cast back.
    max_pending: evaluations under way at once, at least 1: each holds a copy of the weights.
    on_backpressure: when there are max_pending, or val_compute has too much to do: "skip" leaves the evaluation out,
        which the history says; "block" waits for the oldest; "queue" does so only when there are max_pending.
    async_copy: on CUDA the copy to the host is not waited for.
    verbose: a line on standard output for each result.
    cadence: "epoch": at the end of each; a number: every so many optimizer steps; "trainer": when the trainer would
        evaluate (its eval_strategy and eval_steps), in place of that.
    on_error: "record": evaluations that fail say so in the history; "raise": they end training.
    gate: "auto" begins beside training, tries evaluations between its steps when that is cheap, and keeps the faster;
        "always" never tries; "sync" evaluates while training waits.
    timeout_s: seconds that an evaluation may run. max_age_steps: results that come when training is more steps ahead
        are "late": logged, but they decide nothing. None: no limit.
    load: (model, state) -> None, puts weights into the factory's model; None: as state dicts are loaded.
    trainable_only: whether only what is trained travels, and buffers; "auto": for PEFT's models.
    snapshots: buffers of the copies, to share with others. best: keeps the best weights that were scored in a file.
    timeline: gets what took how long. ranks: of the run; None: those of torch's process group.

    `history`: a row for each evaluation: its metrics, `epoch`, `elapsed_secs` (of the evaluation alone), `step`,
    `snapshot_id`, `submitted_at`, `started_at`, `finished_at`, `worker`, `status`; `skipped` True where it was.
    `records`: the same as EvaluationRecords. `pending`: how many are under way.

    With several ranks every one has this callback; rank 0 sends, and all know the results.
    Raises: UsageError for what is not legal, ArgumentNotPicklable when a factory or payload cannot travel.
    """

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback as _HFTrainerCallback

    class SakuraHFCallback(SakuraHF, _HFTrainerCallback):  # type: ignore[misc]  # its base is Any where not installed
        __doc__ = SAKURAHFCALLBACK_DOC

else:
    __getattr__ = class_at_first_use(
        __name__,
        "SakuraHFCallback",
        SAKURAHFCALLBACK_DOC,
        lambda: (SakuraHF, load_framework("transformers.trainer_callback", extra="transformers").TrainerCallback),
    )
