"""Evaluator that scores copies of a model's weights elsewhere while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ...core.signatures import checked_options
from ...errors import UsageError
from .dispatchers import as_dispatcher
from .gate import GateMode, Way
from .legal import check_at_least, check_one_of
from .model_copy import ModelCopier, ModelCopy
from .pace import Drain, OnBackpressure, Pace
from .pipeline import Evaluation, EvaluationPipeline
from .recipe import OWN_KEY, Recipe
from .records import EvaluationRecord

if TYPE_CHECKING:
    from ..snapshot import SnapshotPool
    from .best import BestModel
    from .timeline import Timeline

OnError = Literal["record", "raise"]

MAX_PENDING = 4
"""Default limit of open evaluations, because each holds a copy of the weights."""


@checked_options
class AsyncEvaluator:
    """Score snapshots of a model beside its training.

    `submit` copies the weights and returns. A worker then runs `eval_fn(model, payload)` on a model with these weights.
    `collect` and `drain` return the records.

    Call all methods from the training thread. Only `model_factory`, `eval_fn`, `load` and the `best` writer run in the
    background. A failed evaluation or a lost worker never disturbs training; the record says what happened.

    Args:
        model_factory: () -> model, called on the worker; only the architecture matters, not the weights.
        eval_fn: (model, payload) -> dict of metrics. It gets a torch model in eval mode.
        payload: further input of `eval_fn`, such as validation data. Sent to each worker once; do not change it.
        compute: where to evaluate: None (threads of this process), "subprocess", a pool, a node or role of one, an
            AdaptiveCompute, or any Dispatcher. A Dispatcher stays open when the evaluator closes.
        drain: "lazy" submits regardless of running evaluations; "strict" waits for the oldest one first.
        cache_key: name under which workers keep the model. By default it is unique to this evaluator. Evaluators with
            the same factory may share a name of yours. None creates a new model for each evaluation.
        fp16_state_dict: send float32 values as float16, cast in the background. Halves the bytes and rounds the weights
            that are scored.
        async_copy: False waits until the device has copied the weights. Makes no difference on the CPU.
        on_backpressure: what to do when the worker is behind or `max_pending` evaluations are open. "skip" makes no
            copy and records that; "block" waits for the oldest one; "queue" submits anyway, and waits only at
            `max_pending`, so that memory stays bounded.
        max_pending: limit of open evaluations, at least 1. Each holds a copy of the weights.
        on_error: "record" turns a failure into a record; "raise" also raises it in `collect`, `drain` and `close`.
        gate: "auto" starts beside training. In a run long enough for a cheap trial, it tries evaluations between steps
            and keeps the faster way; it never waits for a cold worker. "always" stays beside, "sync" makes training
            wait for each. A dispatcher with `is_elsewhere` needs no trial.
        timeout_s: limit of an evaluation's running time in seconds; None means none, and `drain` waits accordingly.
        max_age_steps: metrics are recorded as "late" if training is further ahead than this; None means never.
        load: (model, state) -> None, loads the weights; None handles torch's state dicts and Keras's weight lists.
        snapshots: source of the copies' buffers; None shares them with this process's asynchronous checkpoints.
        best: keeps the weights with the best score.
        timeline: records what happened when.
        name: name in logs and of threads.
        argument_names: names of this class's arguments in errors, for wrappers that rename them.

    Raises:
        UsageError: an option is unknown or out of its range.
        ArgumentNotPicklable: a function or the payload cannot be sent to the worker.

    Example:
        >>> def score(model, data):
        ...     return {"loss": abs(model["weight"] - data)}
        >>> def load(model, state):
        ...     model.update(state)
        >>> with AsyncEvaluator(dict, score, 3.0, load=load) as evaluator:
        ...     for step in (1, 2):
        ...         _ = evaluator.submit({"weight": float(step)}, step=step)
        ...     [record.metrics["loss"] for record in evaluator.drain()]
        [2.0, 1.0]
    """

    def __init__(  # noqa: PLR0913  # keyword-only options
        self,
        model_factory: Callable[[], Any],
        eval_fn: Callable[[Any, Any], Any],
        payload: Any = None,
        *,
        compute: Any = None,
        drain: Drain = "lazy",
        cache_key: str | None = OWN_KEY,
        fp16_state_dict: bool = False,
        async_copy: bool = True,
        on_backpressure: OnBackpressure = "skip",
        max_pending: int = MAX_PENDING,
        on_error: OnError = "record",
        gate: GateMode = "auto",
        timeout_s: float | None = None,
        max_age_steps: int | None = None,
        load: Callable[[Any, Any], object] | None = None,
        snapshots: SnapshotPool | None = None,
        best: BestModel | None = None,
        timeline: Timeline | None = None,
        name: str = "evaluation",
        argument_names: Mapping[str, str] | None = None,
    ) -> None:
        names = argument_names or {}
        check_one_of("on_error", on_error, OnError)
        if max_age_steps is not None:
            check_at_least("max_age_steps", max_age_steps, 0)
        self.name = name
        self._on_error, self._async_copy, self._max_age_steps = on_error, async_copy, max_age_steps
        self._best, self._timeline = best, timeline
        self._dispatcher = as_dispatcher(compute, field=names.get("compute", "compute"))
        self._owns_dispatcher = self._dispatcher is not compute
        self._recipe = Recipe(
            model_factory,
            eval_fn,
            payload,
            load=load,
            cache_key=cache_key,
            fp16_state_dict=fp16_state_dict,
            timeout_s=timeout_s,
            shares_memory=self._dispatcher.shares_memory,
            argument_names=names,
        )
        self._pipeline = EvaluationPipeline(
            self._dispatcher, self._recipe, is_late=self._is_late, best=best, timeline=timeline, name=name
        )
        self._pace = Pace(
            self._pipeline, drain=drain, on_backpressure=on_backpressure, max_pending=max_pending, gate=gate
        )
        self._taker = ModelCopier(snapshots, keep=max_pending)
        self._recipe.check_pickles(name)
        self.history: list[EvaluationRecord] = []
        """All records that `collect`, `drain` and `close` have returned."""
        self._ready: list[EvaluationRecord] = []
        self._errors: list[BaseException] = []
        self._step = 0
        """Latest step of training that this object knows."""
        self._submitted = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<AsyncEvaluator {self.name} on {self._dispatcher.name}: {self.pending} open>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for open evaluations and close; if the block raised, cancel them and close."""
        try:
            if kind is None:
                self.drain()
        finally:
            self._shut()
        if kind is None:
            self._raise_errors()

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of open evaluations."""
        return len(self._pipeline.open)

    @property
    def best(self) -> EvaluationRecord | None:
        """Record of the weights that `best=` has kept; None without it, and before the first."""
        return None if self._best is None else self._best.record

    @property
    def way(self) -> Way:
        """Way of the next evaluation: "beside" training, or "inline" while training waits."""
        return self._pace.way

    def latest(self, max_age_steps: int | None = None) -> EvaluationRecord | None:
        """Return the collected record of the highest step with status "ok", as early stopping needs it.

        Args:
            max_age_steps: return None if training is further ahead of the record than this.
        """
        good = [record for record in self.history if record.status == "ok"]
        newest = max(good, key=lambda record: record.step, default=None)
        if newest is None or (max_age_steps is not None and self._step - newest.step > max_age_steps):
            return None
        return newest

    # Called by the training thread -----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Let workers in other processes start, import and create the model while training begins.

        Returns at once. Failures are logged; evaluations then fail for the same reason. Workers in this process need no
        warm-up.
        """
        if not self._is_closed and not self._dispatcher.shares_memory:
            self._pipeline.warm_up()

    def submit(
        self, state: Any, *, step: int, epoch: float | None = None, shares_copy: bool = False
    ) -> EvaluationRecord | None:
        """Copy the weights and have them evaluated.

        Args:
            state: nested dicts and lists of tensors or arrays; a Snapshot, which is retained; or a function that
                returns either, which is not called if this evaluation is skipped.
            step: optimizer steps that these weights have made; never less than before.
            epoch: value for the record.
            shares_copy: share the copy with an asynchronous checkpoint of this step. The weights must not have changed
                in between.

        Returns:
            The record, if it is known already (skipped, or training waited for it), else None. `collect` returns it in
            any case, once.

        Raises:
            UsageError: the evaluator is closed.
        """
        if self._is_closed:
            raise UsageError(f"{self!r}: is closed; submit before close()")
        self._step = max(self._step, step)
        way = self._pace.arrive(step)
        self._submitted += 1
        snapshot_id = f"{self._recipe.token}-{step}-{self._submitted}"
        why = self._pace.make_room()
        evaluation = Evaluation(step=step, epoch=epoch, snapshot_id=snapshot_id)
        if why is not None:
            skipped = self._pipeline.skip(evaluation, why)
            self._pace.leave(step, has_skipped=True)
            return skipped
        self._pipeline.take(evaluation, lambda: self._take(state, step, step if shares_copy else None))
        if way == "inline":
            self._pace.wait_for(evaluation)
        self._pace.leave(step)
        return evaluation.record

    def collect(self, *, step: int | None = None) -> list[EvaluationRecord]:
        """Return the records of evaluations that ended since the last call, in order of submission. Never waits.

        Args:
            step: training's current step, if known; the age of metrics is counted from it.

        Raises:
            Exception: with on_error="raise", the exception of an evaluation; its record comes with the next call.
        """
        if step is not None:
            self._step = max(self._step, step)
        for evaluation in self._pipeline.take_ended():
            assert evaluation.record is not None
            self.history.append(evaluation.record)
            self._ready.append(evaluation.record)
            if evaluation.error is not None:
                evaluation.error.add_note(f"raised by the evaluation of step {evaluation.step}")
                self._errors.append(evaluation.error)
        self._raise_errors()
        ready, self._ready = self._ready, []
        return ready

    def drain(self, timeout_s: float | None = None) -> list[EvaluationRecord]:
        """Wait until all open evaluations have ended, then `collect`. Call it when training ends.

        Args:
            timeout_s: seconds after which open evaluations are cancelled, which their records say. None means no limit
                except each evaluation's own.

        Raises:
            Exception: as `collect`.
        """
        self._pace.wait_for_all(timeout_s)
        return self.collect()

    def close(self) -> None:
        """Cancel open evaluations, and end the threads and processes of this evaluator. Idempotent.

        Call `drain` first to keep open evaluations.

        Raises:
            Exception: with on_error="raise", the exception of an evaluation.
        """
        self._shut()
        self._raise_errors()

    # Internals -------------------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._pipeline.end_warm_up()
        for evaluation in self._pipeline.open:
            self._pipeline.cancel(evaluation, "the evaluator was closed before the evaluation ended")
        if self._owns_dispatcher:
            self._dispatcher.close(cancel=True)
        self._pipeline.close()
        for evaluation in self._pipeline.take_ended():
            assert evaluation.record is not None
            self.history.append(evaluation.record)

    def _take(self, state: Any, step: int, moment: int | None) -> ModelCopy:
        began = time.time()
        if callable(state):
            state = state()
        snapshot = self._taker.take(state, waits=not self._async_copy, moment=moment)
        if self._timeline is not None:
            self._timeline.add("snapshot", f"step {step}", began, time.time(), step=step)
        return snapshot

    def _is_late(self, step: int) -> bool:
        return self._max_age_steps is not None and self._step - step > self._max_age_steps

    def _raise_errors(self) -> None:
        if self._on_error == "record":
            self._errors.clear()
        elif self._errors:
            raise self._errors.pop(0)
