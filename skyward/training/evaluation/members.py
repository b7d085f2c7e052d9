"""Workers of an AdaptiveCompute, and the probes that show whether they live."""

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

GIVE_UP_S = 30.0
"""Seconds after which an unanswered probe is cancelled, which kills a process that hangs.

Much longer than any probe timeout: a process that is still starting must not be killed, or it would never be up.
"""
_LOOK_S = 0.1
"""Seconds until a round that waits for answers notices a stop."""


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """Current state of one worker of an AdaptiveCompute.

    Example:
        >>> from skyward.training.evaluation import AdaptiveCompute
        >>> with AdaptiveCompute([None]) as compute:
        ...     compute.workers[0].is_suspended
        False
    """

    name: str
    latency_s: float
    """Expected seconds of an evaluation."""
    deviation_s: float
    round_trip_s: float | None
    """Seconds of a call that does nothing; None before the first."""
    open: int
    """Evaluations that were sent there and have not ended."""
    failures: int
    is_suspended: bool
    """True if it failed and gets no evaluations for a while."""
    is_drifting: bool
    """True if it has become slower than it was."""


class Probe:
    """Probe of a worker: a job that does nothing."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._began = time.monotonic()
        self._took_s = 0.0
        try:
            self.future: Future[Any] = dispatcher.submit(_probe_job())
        except Exception as error:  # a user's dispatcher, or a closed one: counts as no answer
            self.future = Future()
            self.future.set_exception(error)
        self.future.add_done_callback(self._done)

    def _done(self, _: Future[Any]) -> None:
        self._took_s = time.monotonic() - self._began

    @property
    def answer_s(self) -> float | None:
        """Seconds until the answer; None if there is none."""
        is_answer = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        return self._took_s if is_answer else None

    def take_back_if_old(self) -> None:
        if time.monotonic() - self._began > GIVE_UP_S:
            self.future.cancel()


@dataclass(eq=False)
class EvaluationWorker:
    """One worker; the AdaptiveCompute's lock guards its score."""

    name: str
    dispatcher: Dispatcher
    is_ours: bool
    """True if the AdaptiveCompute created it, and closes it."""
    score: WorkerScore
    probe: Probe | None = None
    """Latest probe."""
    warmed_for: set[str] = field(default_factory=set)
    """Cache keys of the models that its processes were asked to create since the last loss."""

    def slots_to_warm(self, job: Job) -> int:
        """Return the number of warm-ups needed before jobs like this one, and count them as sent."""
        if self.dispatcher.shares_memory or self.score.is_suspended:
            return 0
        name = job.cache_key or ""
        if name in self.warmed_for:
            return 0
        self.warmed_for.add(name)
        return min(self.score.idle_slots, WARMED_SLOTS)

    def is_called(self, worker: Any) -> bool:
        """Return whether `worker` is this worker's name or the object that the user passed."""
        if isinstance(worker, str):
            return worker == self.name
        return worker is not None and (worker is self.dispatcher or worker == getattr(self.dispatcher, "target", None))

    def named(self, outcome: Outcome) -> Outcome:
        """Return the outcome with a name that differs from other workers with the same dispatcher name."""
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


def probe_workers(
    members: Sequence[EvaluationWorker], timeout_s: float, is_to_stop: Callable[[], bool] = lambda: False
) -> dict[EvaluationWorker, float | None]:
    """Probe all workers at once; return the seconds until each answered, or None after `timeout_s`.

    A worker with an open probe gets no second one, and its late answer exceeds `timeout_s`. Call from one thread at a
    time.
    """
    began = time.monotonic()
    for member in members:
        if member.probe is None or member.probe.future.done():
            member.probe = Probe(member.dispatcher)
    probes = {member: member.probe for member in members if member.probe is not None}
    left = {probe.future for probe in probes.values()}
    while left and (waited := time.monotonic() - began) < timeout_s and not is_to_stop():
        _, left = concurrent.futures.wait(left, min(_LOOK_S, timeout_s - waited))
    answers = {member: probe.answer_s for member, probe in probes.items()}
    for probe in probes.values():
        probe.take_back_if_old()
    return answers


class HealthProbes:
    """Thread that calls `probe` at intervals until it is stopped.

    Args:
        probe: called with a function that returns whether to stop.
        interval_s: seconds between two calls.
    """

    def __init__(self, probe: Callable[[Callable[[], bool]], object], interval_s: float) -> None:
        self._probe, self._interval_s = probe, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyward-health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for the thread."""
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
