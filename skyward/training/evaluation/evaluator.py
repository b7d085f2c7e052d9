"""Evaluates copies of a model's weights elsewhere, while training goes on."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from ...errors import UsageError
from .dispatcher import Content, Dispatcher
from .dispatchers import as_dispatcher
from .gate import Gate, GateMode, Way
from .pipeline import Evaluation, Pipeline
from .records import EvaluationRecord
from .taking import Taken, Taker

if TYPE_CHECKING:
    from ..snapshot import SnapshotPool
    from .best import BestModel
    from .timeline import Timeline

__all__ = ["AsyncEvaluator", "Drain", "OnBackpressure", "OnError"]

_log = logging.getLogger(__name__)

Drain = Literal["lazy", "strict"]
OnBackpressure = Literal["skip", "queue", "block"]
OnError = Literal["record", "raise"]

OWN_KEY = "own"
PRESSURE_S = 30.0
"""A dispatcher that expects a job to wait longer than this is under pressure, where it does not say itself whether."""
SAYS_AFTER_S = 60.0
"""How long `drain` waits before it says what for."""
LARGE_BYTES = 16 << 20
"""A function whose pickle is larger has probably caught a model or its data."""


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
        gate: "auto" measures for five intervals whether evaluation beside training is faster than between its steps,
            and keeps the faster; in these, training waits for evaluations. "always": never tries. "sync": each is
            waited for. A dispatcher that says `is_elsewhere` needs no trial.
        timeout_s: seconds that an evaluation may run; None: no limit, and `drain` waits as long.
        max_age_steps: metrics that come when training is further ahead than this are recorded as "late".
        load: (model, state) -> None. None: torch's state dicts and Keras's lists of weights.
        snapshots: where copies are taken; None: where asynchronous checkpoints of this process take theirs.
        best: keeps the weights that were scored best.
        timeline: gets what happened when.
        name: for logs and threads.

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
        max_pending: int = 4,
        on_error: OnError = "record",
        gate: GateMode = "auto",
        timeout_s: float | None = None,
        max_age_steps: int | None = None,
        load: Callable[[Any, Any], object] | None = None,
        snapshots: SnapshotPool | None = None,
        best: BestModel | None = None,
        timeline: Timeline | None = None,
        name: str = "evaluation",
    ) -> None:
        for field, value, kind in (
            ("drain", drain, Drain),
            ("on_backpressure", on_backpressure, OnBackpressure),
            ("on_error", on_error, OnError),
            ("gate", gate, GateMode),
        ):
            if value not in get_args(kind):
                raise UsageError(f"{field}: {value!r}; it is one of {', '.join(map(repr, get_args(kind)))}")
        for field, function in (("model_factory", model_factory), ("eval_fn", eval_fn)):
            if not callable(function):
                raise UsageError(f"{field}: {function!r} cannot be called; give a function")
        _at_least("max_pending", max_pending, 1)
        _at_least("max_age_steps", max_age_steps, 0)
        if timeout_s is not None and not timeout_s > 0:
            raise UsageError(f"timeout_s: {timeout_s!r}; it is a number of seconds above 0, or None")
        self.name = name
        self._drain, self._on_backpressure, self._on_error = drain, on_backpressure, on_error
        self._async_copy, self._max_pending, self._max_age_steps = async_copy, max_pending, max_age_steps
        self._best, self._timeline = best, timeline
        self._gate = Gate(gate)
        self._token = secrets.token_hex(4)
        self._dispatcher: Dispatcher = as_dispatcher(compute)
        self._owns_dispatcher = self._dispatcher is not compute
        self._taker = Taker(snapshots, keep=max_pending)
        contents = {
            "factory": Content(model_factory, "model_factory"),
            "eval_fn": Content(eval_fn, "eval_fn"),
            "payload": Content(payload, "payload"),
        }
        if not self._dispatcher.shares_memory:
            self._check_pickles(contents)
        self._pipeline = Pipeline(
            self._dispatcher,
            **contents,
            load=load,
            cache_key=lambda: self._model_key(cache_key, contents["factory"]),
            is_half=fp16_state_dict,
            timeout_s=timeout_s,
            is_late=self._is_late,
            best=best,
            timeline=timeline,
            name=name,
        )
        self.history: list[EvaluationRecord] = []
        """Every record that `collect`, `drain` and `close` have given."""
        self._ready: list[EvaluationRecord] = []
        self._errors: list[BaseException] = []
        self._step = 0
        """How far training is, as far as it is known here."""
        self._submitted = 0
        self._left_at = time.time()
        self._left_step = 0
        self._interval_at: float | None = None
        self._interval_step = 0
        self._is_closed = False
        if gate == "auto" and getattr(self._dispatcher, "is_elsewhere", False):
            self._gate.settle("beside")

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
        return self._gate.way

    def latest(self, max_age_steps: int | None = None) -> EvaluationRecord | None:
        """The collected one of the highest step that ended well and in time: what early stopping may act on.

        Args:
            max_age_steps: None where training is further ahead of it than this.
        """
        well = [each for each in self.history if each.status == "ok"]
        newest = max(well, key=lambda each: each.step, default=None)
        if newest is None or (max_age_steps is not None and self._step - newest.step > max_age_steps):
            return None
        return newest

    # What the training thread does -----------------------------------------------------------------------------------

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
        self._train_until_now(step)
        way = self._begin_interval(step)
        self._submitted += 1
        snapshot_id = f"{self._token}-{step}-{self._submitted}"
        if (why := self._make_room()) is not None:
            skipped = EvaluationRecord(
                step=step,
                epoch=epoch,
                snapshot_id=snapshot_id,
                submitted_at=time.time(),
                status="skipped",
                error=why,
            )
            self._pipeline.skip(skipped)
            self._interval_at = None  # an interval without an evaluation tells the gate nothing
            self._left_at, self._left_step = time.time(), step
            return skipped
        evaluation = Evaluation(step=step, epoch=epoch, snapshot_id=snapshot_id, submitted_at=time.time())
        self._pipeline.take(evaluation, lambda: self._take(state, step, step if shares_copy else None))
        if way == "inline":
            self._wait_for(evaluation)
        self._left_at, self._left_step = time.time(), step
        return evaluation.record

    def collect(self, *, step: int | None = None) -> list[EvaluationRecord]:
        """What has ended since the last call, by submission. Never waits.

        Args:
            step: how far training is, where that is known; the age of metrics is counted by it.

        Raises: with on_error="raise", what an evaluation raised; its record comes with the next call.
        """
        if step is not None:
            self._step = max(self._step, step)
        for each in self._pipeline.take_ended():
            assert each.record is not None
            self.history.append(each.record)
            self._ready.append(each.record)
            if each.error is not None:
                each.error.add_note(f"raised by the evaluation of step {each.step}")
                self._errors.append(each.error)
        self._raise_errors()
        ready, self._ready = self._ready, []
        return ready

    def drain(self, timeout_s: float | None = None) -> list[EvaluationRecord]:
        """As `collect`, when all that are open have ended: for the end of training.

        Args:
            timeout_s: what has not ended then is cancelled, and its record says so. None: no limit but that of each
                evaluation.
        """
        began = time.time()
        while not self._pipeline.wait(lambda: not self._pipeline.open, self._patience(began, timeout_s)):
            if timeout_s is None or time.time() - began < timeout_s:
                oldest = self._pipeline.open[0].step if self.pending else None
                _log.warning("%s: waiting for %d, the oldest of step %s", self.name, self.pending, oldest)
                continue
            for each in self._pipeline.open:
                self._pipeline.cancel(each, f"it had not ended {timeout_s:g} s after training had, and was cancelled")
        self._waited(began, "drain")
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
        for each in self._pipeline.open:
            self._pipeline.cancel(each, "the evaluator was closed before it had ended")
        if self._owns_dispatcher:
            self._dispatcher.close(cancel=True)
        self._pipeline.close()
        for each in self._pipeline.take_ended():
            assert each.record is not None
            self.history.append(each.record)

    def _patience(self, began: float, timeout_s: float | None) -> float:
        """Seconds to wait until something is to be said, or done."""
        left = SAYS_AFTER_S if timeout_s is None else began + timeout_s - time.time()
        return min(SAYS_AFTER_S, max(0.0, left))

    def _take(self, state: Any, step: int, moment: int | None) -> Taken:
        began = time.time()
        if callable(state):
            state = state()
        snapshot = self._taker.take(state, waits=not self._async_copy, moment=moment)
        if self._timeline is not None:
            self._timeline.add("snapshot", f"step {step}", began, time.time(), step=step)
        return snapshot

    def _make_room(self) -> str | None:
        """Waits where it is to. Gives why this evaluation is to be skipped; None where it is not."""
        if self._drain == "strict":
            self._wait_for_oldest()
        pending = self.pending
        if pending >= self._max_pending:
            if self._on_backpressure == "skip":
                return f"{pending} evaluations were open, which is max_pending"
            self._wait_for_oldest(until=self._max_pending - 1)
        if self._on_backpressure != "queue" and self._is_under_pressure():
            if self._on_backpressure == "skip":
                return f"{self._dispatcher.name} is behind by {self._dispatcher.pressure():.3g} s"
            self._wait_for_oldest()
        return None

    def _is_under_pressure(self) -> bool:
        says = getattr(self._dispatcher, "is_backpressured", None)
        return bool(says()) if callable(says) else self._dispatcher.pressure() > PRESSURE_S

    def _wait_for_oldest(self, until: int | None = None) -> None:
        """Until the oldest has ended, or so many are left."""
        opened = self._pipeline.open
        if not opened:
            return
        left = len(opened) - 1 if until is None else until
        began = time.time()
        self._pipeline.wait(lambda: len(self._pipeline.open) <= left)
        self._waited(began, "block")

    def _wait_for(self, evaluation: Evaluation) -> None:
        began = time.time()
        self._pipeline.wait(lambda: evaluation.record is not None)
        self._waited(began, "inline")

    def _waited(self, began: float, why: str) -> None:
        if self._timeline is not None:
            self._timeline.add("training", "wait", began, time.time(), why=why)

    def _train_until_now(self, step: int) -> None:
        """Draws what training did since it left here."""
        self._step = max(self._step, step)
        if self._timeline is not None:
            # The first begins with the evaluator, at a step that nobody told.
            name = f"steps {self._left_step} to {step}" if self._submitted else f"to step {step}"
            self._timeline.add("training", name, self._left_at, time.time())

    def _begin_interval(self, step: int) -> Way:
        """Tells the gate of the interval that ends here, and asks it about the next one."""
        if not self._gate.is_settled:
            began = time.time()
            if self.pending:
                self._pipeline.wait(lambda: not self._pipeline.open)
                self._waited(began, "trial")
            now = time.perf_counter()
            if self._interval_at is not None:
                self._gate.observe(now - self._interval_at, steps=step - self._interval_step)
                if self._gate.is_settled:
                    _log.info("%s: evaluations go %s: %s", self.name, self._gate.way, self._gate.seconds)
            self._interval_at, self._interval_step = now, step
        return self._gate.way

    def _is_late(self, step: int) -> bool:
        return self._max_age_steps is not None and self._step - step > self._max_age_steps

    def _raise_errors(self) -> None:
        if self._on_error == "record":
            self._errors.clear()
        elif self._errors:
            raise self._errors.pop(0)

    def _model_key(self, cache_key: str | None, factory: Content) -> str | None:
        """Called in the background: a digest takes as long as pickling."""
        if cache_key is None:
            return None
        if self._dispatcher.shares_memory:  # models are in this process: a digest would only cost
            return f"{self._token}:{cache_key}"
        return f"{factory.digest}:{self._token if cache_key == OWN_KEY else cache_key}"

    def _check_pickles(self, contents: dict[str, Content]) -> None:
        for name, content in contents.items():
            size = len(content.data)
            if name != "payload" and size > LARGE_BYTES:
                _log.warning(
                    "%s: %s has %.3g MB when it is sent: it has probably caught a model or its data; give data as "
                    "payload, and make the model in model_factory",
                    self.name,
                    content.field,
                    size / 1e6,
                )


def _at_least(field: str, value: int | None, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise UsageError(f"{field}: {value!r}; it is a whole number >= {least}")
