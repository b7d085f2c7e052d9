"""From a snapshot to a record, off the training thread: one lane sends, in order, and one receives."""

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

__all__ = ["Evaluation", "Lane", "EvaluationPipeline", "metrics_of"]

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
"""How long `close` waits for a dispatcher that is in the middle of taking a job."""
DRAWN_S = 0.001
"""Shorter waits of an evaluation for its worker are not drawn."""


class Lane:
    """Runs functions one after another in a thread that is there only while there are some. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, work: Callable[[], None]) -> None:
        """Work must not raise: what it raises is logged."""
        with self._lock:
            self._queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Until nothing is left to do. False: the time is up."""
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                work = self._queue.popleft()
            try:
                work()
            except BaseException:  # whatever it is: those behind it have their turn
                _log.exception("%s failed", self._name)


@dataclass(eq=False)
class Evaluation:
    """One evaluation on its way. The pipeline sets the fields from `snapshot` on."""

    step: int
    epoch: float | None
    snapshot_id: str
    submitted_at: float = field(default_factory=time.time)
    snapshot: ModelCopy | None = None
    """Retained for this evaluation. None: training copies it just now, or could not."""
    is_taken: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when the training thread has the copy, or has none."""
    future: Future[Outcome] | None = None
    record: EvaluationRecord | None = None
    """None while it is open."""
    error: BaseException | None = None
    is_released: bool = field(default=False, repr=False)

    def record_of(self, status: Status, **ending: Any) -> EvaluationRecord:
        """Make its record. ending: the other fields that say how it ended."""
        return EvaluationRecord(
            step=self.step,
            epoch=self.epoch,
            snapshot_id=self.snapshot_id,
            submitted_at=self.submitted_at,
            status=status,
            **ending,
        )


class EvaluationPipeline:
    """Sends snapshots to a dispatcher and makes records of what comes back. Thread-safe.

    is_late: whether metrics of a step that come now are too old.
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
        """Evaluations that ended well."""
        self.shortest_s = math.inf
        """Of those, without what they waited for."""

    # What the training thread calls ----------------------------------------------------------------------------------

    @property
    def open(self) -> list[Evaluation]:
        """Those without a record, the oldest first."""
        with self._changed:
            return list(self._open)

    def warm_up(self) -> None:
        """Have workers in other processes import and make what evaluations need. What fails there is logged once."""
        self._sender.put(self._warm_up)

    def take(self, evaluation: Evaluation, take: Callable[[], ModelCopy]) -> None:
        """Has the training thread make the copy, and sends it. What `take` gives is the pipeline's to release.

        The thread that sends is started before the copy: a thread that starts holds the interpreter for its first
        milliseconds, and training would wait for it behind the copy. Raises: what `take` does; then nothing is sent.
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
        """Queue an evaluation that is not sent behind those that have ended, and return its record."""
        evaluation.record = record = evaluation.record_of("skipped", error=why)
        with self._changed:
            self._ended.append(evaluation)
        return record

    def take_ended(self) -> list[Evaluation]:
        """Those that have ended since the last call, in the order in which they were submitted."""
        with self._changed:
            ended, self._ended = self._ended, []
        return sorted(ended, key=lambda evaluation: evaluation.submitted_at)

    def wait(self, is_met: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Until `is_met`, which is looked at when an evaluation has ended. False: the time is up."""
        with self._changed:
            return self._changed.wait_for(is_met, timeout_s)

    def cancel(self, evaluation: Evaluation, why: str) -> None:
        """Its record says `why`, at once; what its worker does about it is the dispatcher's matter."""
        self._end(evaluation, TimeoutError(why), text=why)
        future = evaluation.future
        if future is not None:
            future.cancel()

    def end_warm_up(self) -> None:
        """Say nothing more about it: the dispatcher is about to be closed."""
        self._is_closing = True

    def close(self) -> None:
        """Waits for the lanes; what is open must have been cancelled."""
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
        except Exception as error:  # of a dispatcher that is closed, or of the user's
            self._warn_of_warm_up(error)
            return
        for future in futures:
            future.add_done_callback(lambda done: None if done.cancelled() else self._warn_of_warm_up(done.exception()))

    def _warn_of_warm_up(self, error: BaseException | None) -> None:
        text = "" if error is None else _said(error)
        if error is None or self._is_closing or text in self._warned:
            return
        self._warned.add(text)  # evaluations will fail by the same
        _log.warning("%s: %s cannot prepare for evaluations: %s", self.name, self.dispatcher.name, text)

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
        except BaseException as error:  # also what a pickle of the user's raises to end a process: training goes on
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
        except Exception as error:  # an evaluation without a record would be waited for for ever
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
        """To the best model, which may write it: that takes time, and may fail."""
        if self._best is None or evaluation.record is not None or evaluation.snapshot is None:
            return record
        try:
            self._best.offer(record, evaluation.snapshot.state)
        except Exception as error:
            evaluation.error = error
            _log.warning("%s: the weights of step %d could not be kept", self.name, record.step, exc_info=error)
            return replace(record, error=f"the best model was not written: {_said(error)}")
        return record

    def _end(
        self,
        evaluation: Evaluation,
        error: BaseException,
        *,
        text: str | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """Without metrics."""
        text = text or _said(error)
        record = evaluation.record_of(
            "failed",
            started_at=None if outcome is None else outcome.started_at,
            finished_at=time.time() if outcome is None else outcome.finished_at,
            worker="" if outcome is None else outcome.worker,
            error=text,
        )
        if self._conclude(evaluation, record, error) and text not in self._warned:
            self._warned.add(text)  # once for each text: a wrong eval_fn fails every time
            _log.warning("%s: the evaluation of step %d failed: %s", self.name, evaluation.step, text)

    def _conclude(self, evaluation: Evaluation, record: EvaluationRecord, error: BaseException | None = None) -> bool:
        """False: it had been cancelled, and has its record."""
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
        """sending: from when to when it was handed over."""
        if self.timeline is None:
            return
        name, (began, ended) = f"step {evaluation.step}", sending
        arrived = outcome.started_at
        leaves = max(ended, arrived - outcome.transfer_s)  # its queue
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
    """Give what `eval_fn` returned, with plain numbers. Raises: UsageError, naming `field`: it is no dictionary."""
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{field}: it returned {type(value).__name__} ({value!r:.80}); return a dictionary of metrics, such as "
            '{"eval_loss": 0.5}'
        )
    return {str(name): _plain(item) for name, item in value.items()}


def _plain(value: Any) -> Any:
    """A number in place of an array or tensor of one."""
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) is not None:
        return value.item() if value.shape == () or tuple(value.shape) == (1,) else value
    return value


def _said(error: BaseException) -> str:
    if isinstance(error, CancelledError):
        return "it was cancelled"
    if isinstance(error, SkywardError | TimeoutError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
