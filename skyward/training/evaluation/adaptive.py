"""Several workers as one dispatcher: evaluations share a queue, and each goes where it should end first."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from ...core.bounds import is_positive
from ...core.signatures import checked_options
from ...errors import ArgumentNotPicklable, NodeError, PoolClosed, UsageError
from .dispatcher import Dispatcher, Job, Outcome, warm_up_of
from .dispatchers import as_dispatcher
from .dispatchers.futures import new_future, settle, settle_error
from .legal import check_at_least
from .members import EvaluationWorker, HealthProbes, WorkerState, probe_workers
from .pipeline import Lane
from .placement import place
from .worker_score import WorkerScore, median_s

_log = logging.getLogger(__name__)

_GONE = (NodeError, PoolClosed)
"""Errors of the worker, after which the evaluation may succeed on another one."""
_THRESHOLD_FACTOR = 1.5
_STRIKES = 1
"""Losses of a worker after which it is suspended."""


@checked_options
class AdaptiveCompute:
    """Send each evaluation to the worker that should finish it first.

    Evaluations wait in one queue until a worker has a free slot. Latencies are measured on the evaluations themselves.
    A worker in another process is warmed up beside the others first, and gets evaluations once it has imported and
    created all that they need. An idle worker that looked slow is tried again after a while.

    A lost worker is suspended for a while, and its evaluation is retried once on another one. `is_backpressured()` is
    true while all workers are behind, and false as soon as one has caught up. Thread-safe. It is a `Dispatcher`, so
    several evaluators may share one.

    Args:
        workers: at least one. Each is anything that an evaluator's `compute` accepts: None (threads of this process),
            "subprocess", a pool, a node or role of one, or a Dispatcher. Pools and dispatchers stay open when this
            object closes.
        beta1: weight of the past in the average latency, in [0, 1).
        beta2: weight of the past in the latency's variance, in [0, 1).
        softmax_temperature: seconds, at least 0. 0 always takes the best worker; above 0, another one now and then.
        initial_latency: seconds, above 0; the estimate for a worker without a measurement.
        backpressure_threshold: seconds, above 0, that an evaluation may wait before it begins.
        chance: random generator, for tests.

    Raises:
        UsageError: a value is out of its range, or a worker is none of these.

    Example:
        >>> with AdaptiveCompute([None, None]) as compute:
        ...     [worker.name for worker in compute.workers]
        ['in-process', 'in-process 2']
    """

    name = "adaptive"

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        softmax_temperature: float = 0.0,
        initial_latency: float = 1.0,
        backpressure_threshold: float = 30.0,
        chance: random.Random | None = None,
    ) -> None:
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not (is_positive(beta, or_zero=True) and beta < 1):
                raise UsageError(f"{name}={beta!r}: must be a number >= 0 and < 1; set {name}=0.9, for example")
        if not is_positive(softmax_temperature, or_zero=True):
            raise UsageError(
                f"softmax_temperature={softmax_temperature!r}: must be seconds >= 0; set 0 for always the best worker"
            )
        _check_seconds("initial_latency", initial_latency)
        _check_seconds("backpressure_threshold", backpressure_threshold)
        if isinstance(workers, (str, bytes)) or not isinstance(workers, Sequence) or not workers:
            raise UsageError(f"workers={workers!r}: must be a list; pass at least one pool, pool.node(1), None, ...")
        self._beta1, self._beta2 = beta1, beta2
        self._temperature, self._initial_s = softmax_temperature, initial_latency
        self._threshold_s, self._has_own_threshold = backpressure_threshold, True
        self._chance = chance or random.Random()
        self._changed = threading.Condition()
        self._probe_lock = threading.Lock()
        self._members: list[EvaluationWorker] = []
        self._open: dict[Future[Any], _Sent] = {}
        self._waiting: list[_Sent] = []
        """Evaluations of `_open` that no worker has, oldest first."""
        self._warming: set[Future[Outcome]] = set()
        self._lane = Lane("skyward-adaptive")
        """Sends waiting evaluations; the thread that reports an outcome must not block, because others wait for it."""
        self._endings = Lane("skyward-adaptive-end")
        """Closes removed workers once their open evaluations have ended."""
        self._probing: HealthProbes | None = None
        self._is_closed = False
        dispatchers = [as_dispatcher(worker, field=f"workers[{at}]") for at, worker in enumerate(workers)]
        for worker, dispatcher in zip(workers, dispatchers, strict=True):
            self._members.append(self._member(dispatcher, is_ours=dispatcher is not worker))

    def __repr__(self) -> str:
        return f"<AdaptiveCompute {', '.join(member.name for member in self._members)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    # A Dispatcher ----------------------------------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Return whether all workers run in this process."""
        return all(member.dispatcher.shares_memory for member in self._members)

    @property
    def is_elsewhere(self) -> bool:
        """Return whether no worker uses this machine."""
        return all(getattr(member.dispatcher, "is_elsewhere", False) for member in self._members)

    @property
    def slots(self) -> int:
        """Number of evaluations that can run at once."""
        return sum(member.dispatcher.slots for member in self._members)

    def submit(self, job: Job) -> Future[Outcome]:
        """Queue an evaluation.

        Args:
            job: the evaluation.

        Returns:
            A future with the outcome. It raises the evaluation's exception, or the reason why the worker is gone.

        Raises:
            UsageError: this object is closed.
        """
        sent = _Sent(job, new_future(self._cancelled))
        with self._changed:
            if self._is_closed:
                raise UsageError(f"{self!r}: is closed; submit before close()")
            self._open[sent.future] = sent
            self._waiting.append(sent)
        self.prepare(job)
        self._fill()
        return sent.future

    def prepare(self, job: Job) -> list[Future[Outcome]]:
        """Warm up the workers in other processes for jobs like this one, unless that was done. Returns at once."""
        with self._changed:
            members = [member for member in self._members for _ in range(member.slots_to_warm(job))]
            keys = [(member, object()) for member in members]
            for member, key in keys:
                member.score.add(key)
        return [self._warm(member, key, warm_up_of(job)) for member, key in keys]

    def pressure(self) -> float:
        """Return the seconds that a job would wait if submitted now; infinite while all workers are suspended."""
        with self._changed:
            return self._place()[1]

    def is_backpressured(self) -> bool:
        """Return whether a job would wait longer than `threshold_s`; false again when a worker has caught up."""
        return self.pressure() > self.threshold_s

    @property
    def threshold_s(self) -> float:
        """Seconds that a job may wait: the argument, or a measured value after `warmup(set_backpressure=True)`."""
        with self._changed:
            slowest = [member.score.quantile_s(0.95) for member in self._members]
        measured = [seconds for seconds in slowest if seconds is not None]
        return self._threshold_s if self._has_own_threshold or not measured else _THRESHOLD_FACTOR * max(measured)

    def close(self, *, cancel: bool = False) -> None:
        """Wait for open evaluations, or cancel them, and close the workers that this object created. Idempotent.

        Args:
            cancel: cancel open evaluations instead of waiting.
        """
        with self._changed:
            self._is_closed = True
            futures = list(self._open) if cancel else []
        self.stop_health_probes()
        for future in reversed(futures):  # newest first: cancelling a running one would start a waiting one
            future.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
            warming = list(self._warming)
        for warm_up in warming:
            warm_up.cancel()
        self._lane.join()
        self._endings.join()
        for member in self._members:
            if member.probe is not None:
                member.probe.future.cancel()
            if member.is_ours:
                member.dispatcher.close(cancel=cancel)

    # Workers ---------------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerState]:
        """Current state of every worker."""
        with self._changed:
            return [member.state() for member in self._members]

    def add_worker(self, worker: Any) -> str:
        """Add a worker, and estimate its latency as the median of the others.

        Args:
            worker: as in the constructor's `workers`.

        Returns:
            The worker's name.

        Raises:
            UsageError: `worker` is not one of the accepted kinds.
        """
        dispatcher = as_dispatcher(worker, field="worker")
        with self._changed:
            initial_s = median_s([member.score for member in self._members])
            member = self._member(dispatcher, is_ours=dispatcher is not worker, initial_s=initial_s)
            self._members.append(member)
        self._lane.put(self._fill)
        return member.name

    def remove_worker(self, worker: Any) -> None:
        """Stop sending evaluations to a worker; its open ones continue.

        Args:
            worker: its name, or the object that was passed as the worker.

        Raises:
            UsageError: no such worker, or it is the last one.
        """
        with self._changed:
            member = next((member for member in self._members if member.is_called(worker)), None)
            if member is None:
                names = ", ".join(repr(member.name) for member in self._members)
                raise UsageError(f"worker={worker!r}: no such worker; use one of {names}")
            if len(self._members) == 1:
                raise UsageError(f"worker={member.name!r}: is the last one; add another worker before removing it")
            self._members.remove(member)
        self._lane.put(self._fill)
        if member.probe is not None:
            member.probe.future.cancel()
        if member.is_ours:
            self._endings.put(member.dispatcher.close)

    def _member(self, dispatcher: Dispatcher, *, is_ours: bool, initial_s: float | None = None) -> EvaluationWorker:
        taken = {member.name for member in self._members}
        numbered = (f"{dispatcher.name} {number}" for number in range(2, len(taken) + 3))
        name = next(name for name in (dispatcher.name, *numbered) if name not in taken)
        score = WorkerScore(
            dispatcher.slots, beta1=self._beta1, beta2=self._beta2, initial_s=initial_s or self._initial_s
        )
        return EvaluationWorker(name, dispatcher, is_ours, score)

    # Sending ---------------------------------------------------------------------------------------------------------

    def _place(self) -> tuple[list[int | None], float]:
        """Place the waiting evaluations. The caller holds the lock."""
        for member in self._members:
            member.score.resize(member.dispatcher.slots)
        return place(
            [None if sent.member is None else sent.member.score for sent in self._waiting],
            [member.score for member in self._members],
            temperature=self._temperature,
            chance=self._chance,
        )

    def _fill(self) -> None:
        """Send waiting evaluations to free workers; called after any change of slots or evaluations."""
        with self._changed:
            placed, _ = self._place()
            going = [
                (sent, self._members[at]) for sent, at in zip(self._waiting, placed, strict=True) if at is not None
            ]
            for sent, member in going:
                self._waiting.remove(sent)
                sent.member, sent.number = member, sent.number + 1
                member.score.add((sent, sent.number))
        # Outside the lock: a submission may pickle and copy for seconds, and calls back into this object.
        for sent, member in going:
            self._send(sent, member)

    def _send(self, sent: _Sent, member: EvaluationWorker) -> None:
        key = (sent, sent.number)
        inner = _submit(member, sent.job)
        with self._changed:
            sent.inner = inner
            is_open = sent.future in self._open
        if not is_open:  # cancelled meanwhile
            inner.cancel()
        inner.add_done_callback(lambda ended: self._ended(sent, member, key, ended))

    def _warm(self, member: EvaluationWorker, key: object, job: Job) -> Future[Outcome]:
        inner = _submit(member, job)
        with self._changed:
            self._warming.add(inner)
        inner.add_done_callback(lambda ended: self._warmed(member, key, ended))
        return inner

    def _warmed(self, member: EvaluationWorker, key: object, inner: Future[Outcome]) -> None:
        error = None if inner.cancelled() else inner.exception()
        with self._changed:
            self._warming.discard(inner)
            member.score.end(key, is_typical=False)
            if isinstance(error, _GONE):
                self._note_loss(member)
            self._changed.notify_all()
        self._lane.put(self._fill)

    def _note_loss(self, member: EvaluationWorker) -> None:
        """Suspend a lost worker. The caller holds the lock."""
        member.score.failed(_STRIKES)
        member.warmed_for.clear()

    def _ended(self, sent: _Sent, member: EvaluationWorker, key: Any, inner: Future[Outcome]) -> None:
        error: BaseException | None = CancelledError() if inner.cancelled() else inner.exception()
        is_gone = isinstance(error, _GONE)
        with self._changed:
            # A timeout is a lower bound of the latency. Without it, a worker that hangs would keep looking fast.
            member.score.end(key, is_typical=error is None or isinstance(error, TimeoutError))
            if is_gone:
                self._note_loss(member)
            elif error is None:
                member.score.went_well()
            is_open = sent.future in self._open
            # Once only: an evaluation that kills its worker must not go on to kill all of them.
            is_again = is_open and is_gone and sent.number == 1 and len(self._members) > 1
            if is_again:
                self._waiting.insert(0, sent)
            else:
                self._open.pop(sent.future, None)
            self._changed.notify_all()
        if is_again:
            _log.warning(
                "%s: retrying the evaluation of step %d on another worker: %s", member.name, sent.job.step, error
            )
        elif is_open and error is None:
            settle(sent.future, member.named(inner.result()))
        elif isinstance(error, CancelledError):
            sent.future.cancel()
        elif error is not None:
            settle_error(sent.future, error)
        self._lane.put(self._fill)

    def _cancelled(self, future: Future[Any]) -> None:
        with self._changed:
            sent = self._open.pop(future, None)
            if sent in self._waiting:
                self._waiting.remove(sent)
            inner = None if sent is None else sent.inner
            self._changed.notify_all()
        if inner is not None:
            inner.cancel()

    # Probes ----------------------------------------------------------------------------------------------------------

    def warmup(
        self,
        rounds: int = 3,
        timeout: float = 10.0,
        *,
        eject_on_failure: bool = False,
        set_backpressure: bool = False,
    ) -> dict[str, float | None]:
        """Measure every worker's round trip with calls that do nothing, and wait for the answers.

        The measurement shows how far away workers are. The duration of evaluations is learned from evaluations.

        Args:
            rounds: calls per worker, at least 1.
            timeout: seconds per call, above 0.
            eject_on_failure: remove workers that do not answer, except the last one.
            set_backpressure: replace the threshold by 1.5 times the 95th percentile of the slowest worker's recent
                evaluations. Until there are some, the given threshold holds.

        Returns:
            The average round trip in seconds by worker name; None for a worker that did not answer.

        Raises:
            UsageError: an argument is out of its range.
            NodeError: no worker answered.
        """
        check_at_least("rounds", rounds, 1)
        _check_seconds("timeout", timeout)
        with self._changed:
            members = list(self._members)
        failed: set[EvaluationWorker] = set()
        for _ in range(rounds):
            with self._probe_lock:
                answers = probe_workers([member for member in members if member not in failed], timeout)
            self._note(answers, timeout, max_strikes=1)
            failed |= {member for member, seconds in answers.items() if seconds is None}
        if len(failed) == len(members):
            raise NodeError(f"{self!r}: no worker answered within {timeout:g} s; check the workers, or raise timeout")
        if eject_on_failure:
            for member in failed:
                self.remove_worker(member.name)
        if set_backpressure:
            self._has_own_threshold = False
        return {member.name: None if member in failed else member.score.round_trip_s for member in members}

    def start_health_probes(self, interval: float = 5.0, timeout: float = 2.0, max_strikes: int = 3) -> None:
        """Probe idle workers in the background, until `stop_health_probes` or `close`.

        Busy workers are not probed, because their evaluation shows whether they live. A worker that misses
        `max_strikes` probes in a row is suspended, longer each time, until it answers again. Another call restarts the
        probes with new values.

        Args:
            interval: seconds between two rounds, above 0.
            timeout: seconds for an answer, above 0.
            max_strikes: missed probes before a suspension, at least 1.

        Raises:
            UsageError: an argument is out of its range, or this object is closed.
        """
        _check_seconds("interval", interval)
        _check_seconds("timeout", timeout)
        check_at_least("max_strikes", max_strikes, 1)
        self.stop_health_probes()
        with self._changed:
            if self._is_closed:
                raise UsageError(f"{self!r}: is closed; start probes before close()")
            self._probing = HealthProbes(
                lambda is_to_stop: self._probe_idle(timeout, max_strikes, is_to_stop), interval
            )

    def stop_health_probes(self) -> None:
        """Stop the probes and wait for the round under way. Idempotent."""
        with self._changed:
            probing, self._probing = self._probing, None
        if probing is not None:
            probing.stop()

    def _probe_idle(self, timeout_s: float, max_strikes: int, is_to_stop: Callable[[], bool]) -> None:
        with self._changed:
            idle = [member for member in self._members if member.score.open < member.dispatcher.slots]
        with self._probe_lock:
            answers = probe_workers(idle, timeout_s, is_to_stop)
        if not is_to_stop():
            self._note(answers, timeout_s, max_strikes)

    def _note(self, answers: Mapping[EvaluationWorker, float | None], timeout_s: float, max_strikes: int) -> None:
        with self._changed:
            for member, seconds in answers.items():
                if seconds is None:
                    member.score.failed(max_strikes)
                elif seconds > timeout_s:  # a late answer to an earlier probe only shows that the worker lives
                    member.score.went_well()
                else:
                    member.score.answered(seconds)


@dataclass(eq=False)
class _Sent:
    job: Job
    future: Future[Outcome]
    inner: Future[Outcome] | None = None
    member: EvaluationWorker | None = field(default=None, repr=False)
    """Worker that has it now, or had it last."""
    number: int = 0
    """Number of times it was sent."""


def _submit(member: EvaluationWorker, job: Job) -> Future[Outcome]:
    """Submit the job; an exception of the submission becomes the future's."""
    try:
        return member.dispatcher.submit(job)
    except ArgumentNotPicklable as error:
        refused: Future[Outcome] = Future()
        refused.set_exception(error)
    except Exception as error:  # a user's dispatcher, or a closed one
        refused = Future()
        problem = f"{member.name}: accepts no evaluations ({error})"
        refused.set_exception(PoolClosed(f"{problem}; remove this worker, or add another"))
    return refused


def _check_seconds(name: str, value: object) -> None:
    if not is_positive(value):
        raise UsageError(f"{name}={value!r}: must be seconds > 0; set {name} to a positive number")
