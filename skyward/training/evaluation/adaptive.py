"""Several workers as one: evaluations wait in one line, and each goes where it is expected to end first."""

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
from .members import EvaluationWorker, HealthProbes, WorkerState, ask
from .pipeline import Lane
from .placement import place
from .worker_score import WorkerScore, median_s

__all__ = ["AdaptiveCompute", "WorkerState"]

_log = logging.getLogger(__name__)

_GONE = (NodeError, PoolClosed)
"""What is the worker's fault and not the evaluation's."""
_THRESHOLD_FACTOR = 1.5
_STRIKES = 1
"""Losses of a worker after which it is left alone for a while."""


@checked_options
class AdaptiveCompute:
    """Sends each evaluation to the worker where it is expected to end first.

        with AdaptiveCompute([pool.node(1), pool.node(2), None]) as compute:
            evaluator = AsyncEvaluator(make_model, score, data, compute=compute)

    Evaluations wait here until a worker has a free slot. Latencies are those of the evaluations themselves: a worker in
    another process is warmed up first, beside the others, and gets evaluations when it has imported and made what they
    need. An idle worker that looked slow is tried again after a while.

    A worker that is lost is left alone for a while, and its evaluation goes to another one, once. Where all of them are
    behind, `is_backpressured()` says so, until one has caught up: that needs no new observation. Thread-safe. A
    Dispatcher: several evaluators may share one.

    Args:
        workers: at least one. Each is what `compute=` of an evaluator may be: None (threads of this process),
            "subprocess", a pool, a node or role of one, or a Dispatcher. Pools and dispatchers stay the user's to
            close.
        beta1, beta2: weights of what was before, in the averages of latency and of its variance, in [0, 1).
        softmax_temperature: seconds, >= 0. 0: always the best; above, another one now and then.
        initial_latency: seconds, > 0, that an evaluation is taken to last where none was seen.
        backpressure_threshold: seconds, > 0, that an evaluation may have to wait before it begins.
        chance: for tests.

    Raises: UsageError.
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
                raise UsageError(f"{name}: {beta!r}; it is a number >= 0 and < 1")
        if not is_positive(softmax_temperature, or_zero=True):
            raise UsageError(f"softmax_temperature: {softmax_temperature!r}; it is a number of seconds >= 0")
        _check_seconds("initial_latency", initial_latency)
        _check_seconds("backpressure_threshold", backpressure_threshold)
        if isinstance(workers, (str, bytes)) or not isinstance(workers, Sequence) or not workers:
            raise UsageError(f"workers: {workers!r}; it is a list of at least one: a pool, pool.node(1), None, ...")
        self._beta1, self._beta2 = beta1, beta2
        self._temperature, self._initial_s = softmax_temperature, initial_latency
        self._threshold_s, self._has_own_threshold = backpressure_threshold, True
        self._chance = chance or random.Random()
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        self._members: list[EvaluationWorker] = []
        self._open: dict[Future[Any], _Sent] = {}
        self._waiting: list[_Sent] = []
        """Those of `_open` that no worker has, the oldest first."""
        self._warming: set[Future[Outcome]] = set()
        self._lane = Lane("skyward-adaptive")
        """Sends what waited, when a worker is free: not the thread that brings an outcome, which others wait for."""
        self._endings = Lane("skyward-adaptive-end")
        """Ends workers that were removed, when what is open there has ended."""
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
        """Whether all workers are in this process."""
        return all(member.dispatcher.shares_memory for member in self._members)

    @property
    def is_elsewhere(self) -> bool:
        """Whether no worker uses this machine."""
        return all(getattr(member.dispatcher, "is_elsewhere", False) for member in self._members)

    @property
    def slots(self) -> int:
        """Evaluations that run at once."""
        return sum(member.dispatcher.slots for member in self._members)

    def submit(self, job: Job) -> Future[Outcome]:
        """Raises: UsageError: it is closed. The future raises what the evaluation raised, or why its worker is gone."""
        sent = _Sent(job, new_future(self._cancelled))
        with self._changed:
            if self._is_closed:
                raise UsageError(f"{self!r} is closed; submit before close()")
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
        """Seconds that a job would wait if it were submitted now; infinite while all workers are suspended."""
        with self._changed:
            return self._place()[1]

    def is_backpressured(self) -> bool:
        """Whether a job would wait longer than `threshold_s`. It is so no longer when a worker has caught up."""
        return self.pressure() > self.threshold_s

    @property
    def threshold_s(self) -> float:
        """Seconds that a job may have to wait: as given, or by `warmup(set_backpressure=True)`."""
        with self._changed:
            slowest = [member.score.quantile_s(0.95) for member in self._members]
        seen = [seconds for seconds in slowest if seconds is not None]
        return self._threshold_s if self._has_own_threshold or not seen else _THRESHOLD_FACTOR * max(seen)

    def close(self, *, cancel: bool = False) -> None:
        """Waits for what is open, or cancels it; ends what was started here. Idempotent."""
        with self._changed:
            self._is_closed = True
            futures = list(self._open) if cancel else []
        self.stop_health_probes()
        for future in reversed(futures):  # or those that wait would begin
            future.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
            warming = list(self._warming)
        for warm_up in warming:
            warm_up.cancel()
        self._lane.join()
        self._endings.join()
        for member in self._members:
            if member.asked is not None:
                member.asked.future.cancel()
            if member.is_ours:
                member.dispatcher.close(cancel=cancel)

    # Workers ---------------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerState]:
        """How they look now."""
        with self._changed:
            return [member.state() for member in self._members]

    def add_worker(self, worker: Any) -> str:
        """One more from now on, taken to be as fast as the median of the others. Returns: its name.

        Raises: UsageError.
        """
        dispatcher = as_dispatcher(worker, field="worker")
        with self._changed:
            initial_s = median_s([member.score for member in self._members])
            member = self._member(dispatcher, is_ours=dispatcher is not worker, initial_s=initial_s)
            self._members.append(member)
        self._lane.put(self._fill)
        return member.name

    def remove_worker(self, worker: Any) -> None:
        """Sends nothing more there; what is open there goes on.

        Args:
            worker: its name, or what was given as the worker.

        Raises: UsageError: there is no such worker, or it is the last.
        """
        with self._changed:
            member = next((member for member in self._members if member.is_called(worker)), None)
            if member is None:
                names = ", ".join(repr(member.name) for member in self._members)
                raise UsageError(f"worker: {worker!r} is none of these; there are {names}")
            if len(self._members) == 1:
                raise UsageError(f"worker: {member.name!r} is the last one; add another before it is removed")
            self._members.remove(member)
        self._lane.put(self._fill)
        if member.asked is not None:
            member.asked.future.cancel()
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
        """Under the lock."""
        for member in self._members:
            member.score.resize(member.dispatcher.slots)
        return place(
            [None if sent.member is None else sent.member.score for sent in self._waiting],
            [member.score for member in self._members],
            temperature=self._temperature,
            chance=self._chance,
        )

    def _fill(self) -> None:
        """Send what waits to the workers that are free. Called whenever a slot or an evaluation was added or freed."""
        with self._changed:
            placed, _ = self._place()
            going = [
                (sent, self._members[at]) for sent, at in zip(self._waiting, placed, strict=True) if at is not None
            ]
            for sent, member in going:
                self._waiting.remove(sent)
                sent.member, sent.number = member, sent.number + 1
                member.score.add((sent, sent.number))
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
        """Under the lock."""
        member.score.failed(_STRIKES)
        member.warmed_for.clear()

    def _ended(self, sent: _Sent, member: EvaluationWorker, key: Any, inner: Future[Outcome]) -> None:
        error: BaseException | None = CancelledError() if inner.cancelled() else inner.exception()
        is_gone = isinstance(error, _GONE)
        with self._changed:
            # What ran out of time lasted at least so long: that counts, or a worker that hangs would look quick.
            member.score.end(key, is_typical=error is None or isinstance(error, TimeoutError))
            if is_gone:
                self._note_loss(member)
            elif error is None:
                member.score.went_well()
            is_open = sent.future in self._open
            is_again = is_open and is_gone and sent.number == 1 and len(self._members) > 1
            if is_again:
                self._waiting.insert(0, sent)
            else:
                self._open.pop(sent.future, None)
            self._changed.notify_all()
        if is_again:
            _log.warning("%s: step %d goes to another worker: %s", member.name, sent.job.step, error)
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
        """Asks each worker so many times to do nothing, all of them at once, and waits.

        Tells how far away they are; how long evaluations last is learnt from evaluations.

        Args:
            rounds: >= 1.
            timeout: seconds, > 0, for each.
            eject_on_failure: those that do not answer are removed, but never the last one.
            set_backpressure: from now on the threshold is 1.5 x the 95th percentile of the evaluations that the slowest
                worker has run lately; until there are some, it is as it was given.

        Returns: by worker: the average of its answers in seconds, or None where there was none.
        Raises: UsageError; NodeError: no worker answered.
        """
        check_at_least("rounds", rounds, 1)
        _check_seconds("timeout", timeout)
        with self._changed:
            members = list(self._members)
        failed: set[EvaluationWorker] = set()
        for _ in range(rounds):
            with self._asking:
                answers = ask([member for member in members if member not in failed], timeout)
            self._note(answers, timeout, max_strikes=1)
            failed |= {member for member, seconds in answers.items() if seconds is None}
        if len(failed) == len(members):
            raise NodeError(f"{self!r}: no worker answered within {timeout:g} s")
        if eject_on_failure:
            for member in failed:
                self.remove_worker(member.name)
        if set_backpressure:
            self._has_own_threshold = False
        return {member.name: None if member in failed else member.score.round_trip_s for member in members}

    def start_health_probes(self, interval: float = 5.0, timeout: float = 2.0, max_strikes: int = 3) -> None:
        """Asks workers that have nothing to do whether they live, until `stop_health_probes` or `close`.

        A busy worker is not asked: its evaluation tells. One that does not answer so many times in a row is left alone,
        longer each time, until it answers again. Started again, with other numbers if need be, by another call.

        Args:
            interval: seconds, > 0, between two rounds.
            timeout: seconds, > 0, for an answer.
            max_strikes: >= 1.

        Raises: UsageError.
        """
        _check_seconds("interval", interval)
        _check_seconds("timeout", timeout)
        check_at_least("max_strikes", max_strikes, 1)
        self.stop_health_probes()
        with self._changed:
            if self._is_closed:
                raise UsageError(f"{self!r} is closed")
            self._probing = HealthProbes(
                lambda is_to_stop: self._probe_idle(timeout, max_strikes, is_to_stop), interval
            )

    def stop_health_probes(self) -> None:
        """Idempotent. Waits for the round that is under way."""
        with self._changed:
            probing, self._probing = self._probing, None
        if probing is not None:
            probing.stop()

    def _probe_idle(self, timeout_s: float, max_strikes: int, is_to_stop: Callable[[], bool]) -> None:
        with self._changed:
            idle = [member for member in self._members if member.score.open < member.dispatcher.slots]
        with self._asking:
            answers = ask(idle, timeout_s, is_to_stop)
        if not is_to_stop():
            self._note(answers, timeout_s, max_strikes)

    def _note(self, answers: Mapping[EvaluationWorker, float | None], timeout_s: float, max_strikes: int) -> None:
        with self._changed:
            for member, seconds in answers.items():
                if seconds is None:
                    member.score.failed(max_strikes)
                elif seconds > timeout_s:  # to an earlier question: it says that the worker lives, and nothing more
                    member.score.went_well()
                else:
                    member.score.answered(seconds)


@dataclass(eq=False)
class _Sent:
    job: Job
    future: Future[Outcome]
    inner: Future[Outcome] | None = None
    member: EvaluationWorker | None = field(default=None, repr=False)
    """Where it is now, or was."""
    number: int = 0
    """How often it was sent."""


def _submit(member: EvaluationWorker, job: Job) -> Future[Outcome]:
    """Submit it there. What the submission raises is the future's."""
    try:
        return member.dispatcher.submit(job)
    except ArgumentNotPicklable as error:
        refused: Future[Outcome] = Future()
        refused.set_exception(error)
    except Exception as error:  # a dispatcher of the user's, or one that is closed
        refused = Future()
        refused.set_exception(PoolClosed(f"{member.name}: it takes no evaluations: {error}"))
    return refused


def _check_seconds(name: str, value: object) -> None:
    if not is_positive(value):
        raise UsageError(f"{name}: {value!r}; it is a number of seconds > 0")
