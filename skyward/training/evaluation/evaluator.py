"""Evaluates copies of a model's weights elsewhere, while training goes on."""

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

__all__ = ["MAX_PENDING", "AsyncEvaluator", "Drain", "OnBackpressure", "OnError"]

OnError = Literal["record", "raise"]

MAX_PENDING = 4
"""How many evaluations may be open by default: each holds a copy of the weights."""


@checked_options
class AsyncEvaluator:
    """Evaluates snapshots of a model beside its training: `eval_fn(model, payload)`, the model with its weights then.

        evaluator = AsyncEvaluator(make_model, score, validation_data)
        for step in ...:
            ...
            evaluator.submit(model.state_dict(), step=step)     # copies the weights, and returns
            for record in evaluator.collect(): ...              # what has ended meanwhile
        evaluator.drain()
        evaluator.close()

    All methods are for the training thread, and only they touch what is yours: records come out of `collect` and
    `drain`, and nothing of yours is called in the background but the four arguments below, on the worker. No failure of
    an evaluation, and of no worker, changes training; records say what happened.

    Args:
        model_factory: makes the architecture on the worker; its weights do not matter.
        eval_fn: (model, payload) -> metrics, a dictionary. A torch model is in evaluation mode when it gets it.
        payload: what else `eval_fn` needs, such as validation data; sent to a worker once. Not to be changed.
        compute: where: None (threads of this process), "subprocess", a pool, a node or role of one, an AdaptiveCompute
            or any Dispatcher. A Dispatcher stays open when the evaluator is closed.
        drain: "lazy": a submission takes no notice of evaluations that run. "strict": it first waits for the oldest.
        cache_key: workers keep the model under it. The default is this evaluator's own; evaluators on other hardware
            share models by a name of yours, as long as they have the same factory. None: made for each evaluation.
        fp16_state_dict: float32 values travel as float16 (and are cast in the background): half the bytes, and metrics
            are of rounded weights.
        async_copy: False waits until the device has made the copy. On the CPU there is no difference.
        on_backpressure: what to do where the worker is behind, or `max_pending` evaluations are open. "skip": no copy
            is made, and a record says so. "block": waits for the oldest. "queue": sends it all the same, but waits for
            the oldest when `max_pending` are open: each holds a copy of the weights, so memory stays bounded.
        max_pending: evaluations that are open at most, >= 1.
        on_error: "record": a failed evaluation is a record. "raise": `collect`, `drain` and `close` raise it, too.
        gate: "auto" begins beside training, tries evaluations between its steps when the run is so long that the trial
            is cheap, and keeps the faster; it waits for no cold worker. "always": never tries. "sync": training waits
            for each. A dispatcher that says `is_elsewhere` needs no trial.
        timeout_s: seconds that an evaluation may run; None: no limit, and `drain` waits as long.
        max_age_steps: metrics that come when training is further ahead than this are recorded as "late".
        load: (model, state) -> None. None: torch's state dicts and Keras's lists of weights.
        snapshots: where copies are taken; None: where asynchronous checkpoints of this process take theirs.
        best: keeps the weights that were scored best.
        timeline: gets what happened when.
        name: for logs and threads.
        argument_names: how errors name arguments of this class, by their names here; for wrappers that give them other
            names.

    Raises: UsageError; ArgumentNotPicklable where workers are other processes.
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
        """Every record that `collect`, `drain` and `close` have given."""
        self._ready: list[EvaluationRecord] = []
        self._errors: list[BaseException] = []
        self._step = 0
        """How far training is, as far as it is known here."""
        self._submitted = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<AsyncEvaluator {self.name} on {self._dispatcher.name}: {self.pending} open>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for what is open, and closes; where the block raises, it only closes."""
        try:
            if kind is None:
                self.drain()
        finally:
            self._shut()
        if kind is None:
            self._raise_errors()

    # What is there ---------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Evaluations that are open."""
        return len(self._pipeline.open)

    @property
    def best(self) -> EvaluationRecord | None:
        """Of the weights that `best=` has kept; None without it, and before the first."""
        return None if self._best is None else self._best.record

    @property
    def way(self) -> Way:
        """How evaluations go now: "beside" training, or "inline": training waits."""
        return self._pace.way

    def latest(self, max_age_steps: int | None = None) -> EvaluationRecord | None:
        """The collected one of the highest step that ended well and in time: what early stopping may act on.

        Args:
            max_age_steps: None where training is further ahead of it than this.
        """
        well = [record for record in self.history if record.status == "ok"]
        newest = max(well, key=lambda record: record.step, default=None)
        if newest is None or (max_age_steps is not None and self._step - newest.step > max_age_steps):
            return None
        return newest

    # What the training thread does -----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Have workers in other processes start, import and make the model now, while training begins. Returns at once.

        A failure there is logged; evaluations fail by it, too. Workers in this process need no warm-up.
        """
        if not self._is_closed and not self._dispatcher.shares_memory:
            self._pipeline.warm_up()

    def submit(
        self, state: Any, *, step: int, epoch: float | None = None, shares_copy: bool = False
    ) -> EvaluationRecord | None:
        """Has the weights of `step` evaluated. The training thread copies them here, and goes on.

        Args:
            state: nested dicts and lists of tensors or arrays; a Snapshot, which is retained; or a function that gives
                either, which is not called where this evaluation is skipped.
            step: optimizer steps that these weights have made, never less than before.
            epoch: for the record.
            shares_copy: what an asynchronous checkpoint of this step has copied already is not copied again, and the
                other way round. Nothing must have written to it in between.

        Returns: the record, where it is known already (skipped; or training waited for it); else None. Either way it
            comes out of `collect`, once.
        Raises: UsageError: it is closed. What copying raises.
        """
        if self._is_closed:
            raise UsageError(f"{self!r} is closed; submit before close()")
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
        """What has ended since the last call, by submission. Never waits.

        Args:
            step: how far training is, where that is known; the age of metrics is counted by it.

        Raises: with on_error="raise", what an evaluation raised; its record comes with the next call.
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
        """As `collect`, when all that are open have ended: for the end of training.

        Args:
            timeout_s: what has not ended then is cancelled, and its record says so. None: no limit but that of each
                evaluation.
        """
        self._pace.wait_for_all(timeout_s)
        return self.collect()

    def close(self) -> None:
        """Cancels what is open, and ends the threads and processes that were started for this evaluator. Idempotent.

        `drain` first, to have them all. Raises: with on_error="raise", what an evaluation raised.
        """
        self._shut()
        self._raise_errors()

    # Within ----------------------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._pipeline.end_warm_up()
        for evaluation in self._pipeline.open:
            self._pipeline.cancel(evaluation, "the evaluator was closed before it had ended")
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
