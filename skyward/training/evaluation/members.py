"""The workers of an AdaptiveCompute, and how they are asked whether they live."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from .dispatcher import NOTHING, WARMED_SLOTS, Content, Dispatcher, Job, Outcome
from .worker_score import WorkerScore

__all__ = ["GIVE_UP_S", "Asked", "HealthProbes", "EvaluationWorker", "WorkerState", "ask"]

GIVE_UP_S = 30.0
"""Seconds after which a question that was not answered is taken back, which ends a process that stands still. Much
longer than any timeout of a probe: a process that is only starting must not be ended, or it would never be there."""
_LOOK_S = 0.1
"""Seconds until a round that waits for answers notices that it is to stop."""


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """How a worker looks now."""

    name: str
    latency_s: float
    """Seconds that an evaluation is expected to last there."""
    deviation_s: float
    round_trip_s: float | None
    """Of a call that does nothing; None: there was none."""
    open: int
    """Evaluations that were sent there and have not ended."""
    failures: int
    is_suspended: bool
    """It failed, and is left alone for a while."""
    is_drifting: bool
    """It has become slower than it was."""


class Asked:
    """A question to a worker: to do nothing."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._began = time.monotonic()
        self._took_s = 0.0
        try:
            self.future: Future[Any] = dispatcher.submit(_probe_job())
        except Exception as error:  # a dispatcher of the user's, or one that is closed: it does not answer
            self.future = Future()
            self.future.set_exception(error)
        self.future.add_done_callback(self._done)

    def _done(self, _: Future[Any]) -> None:
        self._took_s = time.monotonic() - self._began

    @property
    def answer_s(self) -> float | None:
        """Seconds until the answer; None: there is none."""
        is_answer = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        return self._took_s if is_answer else None

    def take_back_if_old(self) -> None:
        if time.monotonic() - self._began > GIVE_UP_S:
            self.future.cancel()


@dataclass(eq=False)
class EvaluationWorker:
    """A worker. Its score is changed under the lock of the AdaptiveCompute."""

    name: str
    dispatcher: Dispatcher
    is_ours: bool
    """Made for the AdaptiveCompute, and closed with it."""
    score: WorkerScore
    asked: Asked | None = None
    """The last question."""
    warmed_for: set[str] = field(default_factory=set)
    """Names of the models that its processes were told to make, since the last loss."""

    def slots_to_warm(self, job: Job) -> int:
        """Count the warm-ups that it needs before jobs like this one; they count as sent from now on."""
        if self.dispatcher.shares_memory or self.score.is_suspended:
            return 0
        name = job.cache_key or ""
        if name in self.warmed_for:
            return 0
        self.warmed_for.add(name)
        return min(self.score.idle_slots, WARMED_SLOTS)

    def is_called(self, worker: Any) -> bool:
        """Whether `worker` is its name, or what the user gave."""
        if isinstance(worker, str):
            return worker == self.name
        return worker is not None and (worker is self.dispatcher or worker == getattr(self.dispatcher, "target", None))

    def named(self, outcome: Outcome) -> Outcome:
        """With the name that tells this worker from others whose dispatchers are called the same."""
        if self.name == self.dispatcher.name:
            return outcome
        is_whole = outcome.worker == self.dispatcher.name
        return replace(outcome, worker=self.name if is_whole else f"{self.name}: {outcome.worker}")

    def state(self) -> WorkerState:
        score = self.score
        return WorkerState(
            name=self.name,
            latency_s=score.latency_s,
            deviation_s=score.deviation_s,
            round_trip_s=score.round_trip_s,
            open=score.open,
            failures=score.failures,
            is_suspended=score.is_suspended,
            is_drifting=score.is_drifting,
        )


def ask(
    members: Sequence[EvaluationWorker], timeout_s: float, is_to_stop: Callable[[], bool] = lambda: False
) -> dict[EvaluationWorker, float | None]:
    """All of them at once, to do nothing: the seconds until each answered; None: it has not, after `timeout_s`.

    A question that is still open is not asked again; its late answer is longer than `timeout_s`. For one thread at a
    time.
    """
    began = time.monotonic()
    for member in members:
        if member.asked is None or member.asked.future.done():
            member.asked = Asked(member.dispatcher)
    asked = {member: member.asked for member in members if member.asked is not None}
    left = {question.future for question in asked.values()}
    while left and (waited := time.monotonic() - began) < timeout_s and not is_to_stop():
        _, left = concurrent.futures.wait(left, min(_LOOK_S, timeout_s - waited))
    answers = {member: question.answer_s for member, question in asked.items()}
    for question in asked.values():
        question.take_back_if_old()
    return answers


class HealthProbes:
    """A thread that calls `probe` every so often, until it is stopped.

    Args:
        probe: called with a function that says whether to stop.
        interval_s: between two calls.
    """

    def __init__(self, probe: Callable[[Callable[[], bool]], object], interval_s: float) -> None:
        self._probe, self._interval_s = probe, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyward-health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Waits until it has stopped."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._probe(self._stop.is_set)


def _probe_job() -> Job:
    return Job(
        factory=NOTHING,
        load=NOTHING,
        eval_fn=NOTHING,
        payload=_NO_PAYLOAD,
        cache_key=None,
        state=None,
        step=0,
        snapshot_id="probe",
        is_warm_up=True,
    )


_NO_PAYLOAD = Content(None, "probe")
