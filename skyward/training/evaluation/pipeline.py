"""Path from a snapshot to a record, off the training thread: one lane sends in order, another receives."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...errors import SkywardError, UsageError
from .dispatcher import WARMED_SLOTS, Dispatcher, Outcome
from .model_copy import ModelCopy
from .recipe import Recipe
from .records import EvaluationRecord, Status

if TYPE_CHECKING:
    from .best import BestModel
    from .timeline import Timeline

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
"""Seconds that `close` waits for a dispatcher in the middle of taking a job."""
DRAWN_S = 0.001
"""Seconds; shorter waits of an evaluation for its worker are left out of the timeline."""


class Lane:
    """Run functions one after another in a thread that exists only while there are some. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, work: Callable[[], None]) -> None:
        """Queue a function. It should not raise: an exception is logged."""
        with self._lock:
            self._queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the queue is empty; return False if the time is up."""
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                # Under the lock of `put`: otherwise a function could be queued after this thread decided to end.
                if not self._queue:
                    self._thread = None
                    return
                work = self._queue.popleft()
            try:
                work()
            except BaseException:  # one bad function must not stop those behind it
                _log.exception("%s failed", self._name)


@dataclass(eq=False)
class Evaluation:
    """One evaluation under way; the pipeline sets the fields from `snapshot` on."""

    step: int
    epoch: float | None
    snapshot_id: str
    submitted_at: float = field(default_factory=time.time)
    snapshot: ModelCopy | None = None
    """Retained for this evaluation. None while training copies it, or if the copy failed."""
    is_taken: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set once the training thread has made the copy, or failed to."""
    future: Future[Outcome] | None = None
    record: EvaluationRecord | None = None
    """None while the evaluation is open."""
    error: BaseException | None = None
    is_released: bool = field(default=False, repr=False)

    def record_of(self, status: Status, **ending: Any) -> EvaluationRecord:
        """Return its record; `ending` holds the other fields that say how it ended."""
        return EvaluationRecord(
            step=self.step,
            epoch=self.epoch,
            snapshot_id=self.snapshot_id,
            submitted_at=self.submitted_at,
            status=status,
            **ending,
        )


class EvaluationPipeline:
    """Send snapshots to a dispatcher and turn the results into records. Thread-safe.

    Args:
        dispatcher: where evaluations run.
        recipe: makes the jobs.
        is_late: (step) -> whether metrics of that step would now be too old.
        best: gets every score, or None.
        timeline: gets the spans, or None.
        name: name in logs and of threads.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        recipe: Recipe,
        *,
        is_late: Callable[[int], bool],
        best: BestModel | None,
        timeline: Timeline | None,
        name: str,
    ) -> None:
        self.dispatcher, self.timeline, self.name = dispatcher, timeline, name
        self._recipe, self._is_late, self._best = recipe, is_late, best
        self._sender, self._receiver = Lane(f"{name} sender"), Lane(f"{name} receiver")
        self._open: list[Evaluation] = []
        self._ended: list[Evaluation] = []
        self._changed = threading.Condition()
        self._warned: set[str] = set()
        self._is_closing = False
        self.scored = 0
        """Number of evaluations with metrics."""
        self.shortest_s = math.inf
        """Duration of the shortest of them, without waiting."""

    # Called by the training thread -----------------------------------------------------------------------------------

    @property
    def open(self) -> list[Evaluation]:
        """Evaluations without a record, oldest first."""
        with self._changed:
            return list(self._open)

    def warm_up(self) -> None:
        """Let workers in other processes import and create what evaluations need; a failure is logged once."""
        self._sender.put(self._warm_up)

    def take(self, evaluation: Evaluation, take: Callable[[], ModelCopy]) -> None:
        """Copy on the training thread with `take`, and send the copy, which the pipeline releases.

        The sending thread is started before the copy. A thread that starts holds the interpreter for its first
        milliseconds, and training would wait for it after the copy. If `take` raises, nothing is sent.
        """
        with self._changed:
            self._open.append(evaluation)
        self._sender.put(lambda: self._send(evaluation))
        try:
            evaluation.snapshot = take()
        except BaseException:
            with self._changed:
                self._open.remove(evaluation)
            raise
        finally:
            evaluation.is_taken.set()

    def skip(self, evaluation: Evaluation, why: str) -> EvaluationRecord:
        """Queue a skipped evaluation behind those that have ended, and return its record."""
        evaluation.record = record = evaluation.record_of("skipped", error=why)
        with self._changed:
            self._ended.append(evaluation)
        return record

    def take_ended(self) -> list[Evaluation]:
        """Return the evaluations that ended since the last call, in the order of their submission."""
        with self._changed:
            ended, self._ended = self._ended, []
        return sorted(ended, key=lambda evaluation: evaluation.submitted_at)

    def wait(self, is_met: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for `is_met`, which is checked when an evaluation ends; return False if the time is up."""
        with self._changed:
            return self._changed.wait_for(is_met, timeout_s)

    def cancel(self, evaluation: Evaluation, why: str) -> None:
        """Give the evaluation a record with the reason at once; stopping the worker is the dispatcher's job."""
        self._end(evaluation, TimeoutError(why), text=why)
        future = evaluation.future
        if future is not None:
            future.cancel()

    def end_warm_up(self) -> None:
        """Silence failures of the warm-up, because the dispatcher is about to close."""
        self._is_closing = True

    def close(self) -> None:
        """Wait for the lanes; open evaluations must have been cancelled before."""
        for lane in (self._sender, self._receiver):
            if not lane.join(CLOSE_TIMEOUT_S):
                _log.warning("%s: %s has been taking a job for %g s", self.name, self.dispatcher.name, CLOSE_TIMEOUT_S)

    # In the lanes ----------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        dispatcher, job = self.dispatcher, self._recipe.warm_up()
        prepare = getattr(dispatcher, "prepare", None)
        try:
            futures = (
                prepare(job)
                if callable(prepare)
                else [dispatcher.submit(job) for _ in range(min(dispatcher.slots, WARMED_SLOTS))]
            )
        except Exception as error:  # a closed dispatcher, or a user's
            self._warn_of_warm_up(error)
            return
        for future in futures:
            future.add_done_callback(lambda done: None if done.cancelled() else self._warn_of_warm_up(done.exception()))

    def _warn_of_warm_up(self, error: BaseException | None) -> None:
        text = "" if error is None else _text_of(error)
        if error is None or self._is_closing or text in self._warned:
            return
        self._warned.add(text)  # evaluations will fail for the same reason, and need not repeat it
        _log.warning("%s: warm-up of %s failed: %s", self.name, self.dispatcher.name, text)

    def _send(self, evaluation: Evaluation) -> None:
        evaluation.is_taken.wait()
        if evaluation.snapshot is None:
            return
        if evaluation.record is not None:  # cancelled meanwhile
            self._release(evaluation)
            return
        began = time.time()
        try:
            state = evaluation.snapshot.state
            job = self._recipe.job(state, step=evaluation.step, snapshot_id=evaluation.snapshot_id)
            future = self.dispatcher.submit(job)
        except BaseException as error:  # even SystemExit from a user's pickling code must not end training
            self._end(evaluation, error)
            self._release(evaluation)
            return
        sending = (began, time.time())
        evaluation.future = future
        future.add_done_callback(lambda done: self._receiver.put(lambda: self._receive(evaluation, done, sending)))
        if evaluation.record is not None:
            future.cancel()

    def _receive(self, evaluation: Evaluation, future: Future[Outcome], sent: tuple[float, float]) -> None:
        try:
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                self._score(evaluation, future.result(), sent)
            else:
                self._end(evaluation, error)
        except Exception as error:  # without a record, `drain` would wait for this evaluation forever
            self._end(evaluation, error)
        finally:
            self._release(evaluation)

    def _score(self, evaluation: Evaluation, outcome: Outcome, sent: tuple[float, float]) -> None:
        self._draw(evaluation, outcome, sent)
        self.scored += 1
        self.shortest_s = min(self.shortest_s, outcome.finished_at - outcome.started_at)
        try:
            metrics = metrics_of(outcome.value, self._recipe.eval_fn_name)
        except UsageError as wrong:
            self._end(evaluation, wrong, outcome=outcome)
            return
        record = evaluation.record_of(
            "late" if self._is_late(evaluation.step) else "ok",
            started_at=outcome.started_at,
            finished_at=outcome.finished_at,
            worker=outcome.worker,
            metrics=metrics,
        )
        self._conclude(evaluation, self._offered(record, evaluation))

    def _offered(self, record: EvaluationRecord, evaluation: Evaluation) -> EvaluationRecord:
        """Offer the score to the best model, which may write it: that takes time and may fail."""
        if self._best is None or evaluation.record is not None or evaluation.snapshot is None:
            return record
        try:
            self._best.offer(record, evaluation.snapshot.state)
        except Exception as error:
            evaluation.error = error
            _log.warning("%s: cannot keep the weights of step %d", self.name, record.step, exc_info=error)
            return replace(record, error=f"the best model was not written: {_text_of(error)}")
        return record

    def _end(
        self,
        evaluation: Evaluation,
        error: BaseException,
        *,
        text: str | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """Conclude an evaluation without metrics."""
        text = text or _text_of(error)
        record = evaluation.record_of(
            "failed",
            started_at=None if outcome is None else outcome.started_at,
            finished_at=time.time() if outcome is None else outcome.finished_at,
            worker="" if outcome is None else outcome.worker,
            error=text,
        )
        if self._conclude(evaluation, record, error) and text not in self._warned:
            self._warned.add(text)  # once per text, because a wrong eval_fn fails every time
            _log.warning("%s: the evaluation of step %d failed: %s", self.name, evaluation.step, text)

    def _conclude(self, evaluation: Evaluation, record: EvaluationRecord, error: BaseException | None = None) -> bool:
        """Set the record; return False if the evaluation was cancelled before and has one."""
        with self._changed:
            if evaluation.record is not None:
                return False
            evaluation.record = record
            evaluation.error = error or evaluation.error
            self._open.remove(evaluation)
            self._ended.append(evaluation)
            self._changed.notify_all()
            return True

    def _release(self, evaluation: Evaluation) -> None:
        with self._changed:
            was_released, evaluation.is_released = evaluation.is_released, True
        if not was_released and evaluation.snapshot is not None:
            evaluation.snapshot.release()

    def _draw(self, evaluation: Evaluation, outcome: Outcome, sending: tuple[float, float]) -> None:
        """Add the evaluation's spans to the timeline; `sending` is the time of the hand-over."""
        if self.timeline is None:
            return
        name, (began, ended) = f"step {evaluation.step}", sending
        arrived = outcome.started_at
        leaves = max(ended, arrived - outcome.transfer_s)  # end of its time in the queue
        if leaves - ended > DRAWN_S:
            self.timeline.add("queue", name, ended, leaves, step=evaluation.step)
            if outcome.transfer_s:
                self.timeline.add("transfer", name, leaves, arrived, step=evaluation.step)
        elif outcome.transfer_s:
            ended = arrived
        self.timeline.add("transfer", name, began, min(ended, arrived), step=evaluation.step)
        self.timeline.add(
            outcome.worker,
            name,
            arrived,
            outcome.finished_at,
            step=evaluation.step,
            load_s=outcome.load_s,
            status="late" if self._is_late(evaluation.step) else "ok",
        )


def metrics_of(value: Any, field: str = "eval_fn") -> dict[str, Any]:
    """Return the result of `eval_fn` with plain numbers; raise UsageError, naming `field`, if it is not a dict."""
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{field}: returned {type(value).__name__} ({value!r:.80}); return a dictionary of metrics, such as "
            '{"eval_loss": 0.5}'
        )
    return {str(name): _plain(item) for name, item in value.items()}


def _plain(value: Any) -> Any:
    """Turn an array or tensor with one element into a number."""
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) is not None:
        return value.item() if value.shape == () or tuple(value.shape) == (1,) else value
    return value


def _text_of(error: BaseException) -> str:
    if isinstance(error, CancelledError):
        return "cancelled"
    if isinstance(error, SkywardError | TimeoutError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
