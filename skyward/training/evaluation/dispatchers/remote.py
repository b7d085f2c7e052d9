"""Dispatcher that runs evaluations on the nodes of a pool."""

from __future__ import annotations

import contextvars
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....calls.pending import PendingCompute
from ....core.bounds import is_positive
from ....errors import InternalError, NodeError, TaskTimeout, UsageError
from ..dispatcher import Job, Outcome
from ..pipeline import Lane
from .backlog import Backlog
from .futures import new_future, settle, settle_error
from .packed import PARTS, pack
from .remote_worker import Reply, evaluate

_TRIES = 4
"""Attempts per job if workers lack contents. From the second one on, a job carries all contents."""


class RemoteTarget(Protocol):
    """Pool, or some of its nodes. The optional `total_slots` is the number of calls that run at once."""

    def submit(self, pending: PendingCompute[Any]) -> Future[Any]: ...


class PoolDispatcher:
    """Run evaluations as calls to a pool, or to some of its nodes. Thread-safe; never closes the pool.

    Large tensors, arrays and contents are sent as blobs, once per node. Each slot unpickles contents once and keeps
    models. A cancelled or timed-out evaluation is interrupted, and its slot is killed if that does not help. An
    evaluation whose slot or node is lost fails with SlotLost or NodeLost.

    Args:
        target: pool, node or role that gets the calls.
        name: name for records and plots; workers are named by their node. None takes the target's own name.
        start_s: extra seconds, >= 0, beyond `timeout_s` for the first evaluation in a slot, which imports what it
            needs.

    Raises:
        UsageError: `start_s` is out of its range.

    Example:
        With an open pool:

            evaluator = AsyncEvaluator(make_model, score, data, compute=PoolDispatcher(pool.node(1), start_s=120))
    """

    shares_memory = False

    def __init__(self, target: RemoteTarget, *, name: str | None = None, start_s: float = 60.0) -> None:
        if not is_positive(start_s, or_zero=True):
            raise UsageError(f"start_s={start_s!r}: must be seconds >= 0; set 0 for no extra time")
        self.target = target
        self.name = name or _name_of(target)
        self._start_s = float(start_s)
        self._context = contextvars.copy_context()
        """Context of the creator, because a target inside a task of a pool reads the current task from it."""
        self.slots = _slots_of(target)
        self._backlog = Backlog(self.slots)
        self._known: set[str] = set()
        """Digests of contents that some worker has. A worker that lacks one says so and gets it."""
        self._holders: set[str] = set()
        """Known slot processes that have answered."""
        self._open: dict[Future[Any], _RemoteCall] = {}
        self._lane = Lane("skyward-evaluation")
        """Unpickles replies, because the threads that deliver them must not wait for an import."""
        self._is_closed = False
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<PoolDispatcher {self.name!r}>"

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the nodes are other machines, judged by the provider's name."""
        pool = getattr(self.target, "pool", self.target)
        return getattr(getattr(pool, "provider", None), "name", "local") != "local"

    def submit(self, job: Job) -> Future[Outcome]:
        """Send a job. Its state has been copied when this returns.

        The future raises the evaluation's exception, TaskTimeout, NodeError, PoolClosed or ArgumentNotPicklable.

        Args:
            job: the evaluation.

        Raises:
            UsageError: the dispatcher is closed.
        """
        call = _RemoteCall(job, new_future(self._cancelled))
        with self._changed:
            if self._is_closed:
                raise UsageError(f"{self!r}: is closed; submit before close()")
            self._open[call.future] = call
            call.is_first_in_line = self._backlog.wait_s() == 0.0
            self.slots = self._backlog.slots = _slots_of(self.target)  # pools may change their size
            self._backlog.add(call.future)
        self._send(call)
        return call.future

    def pressure(self) -> float:
        """Return the seconds that a job would wait if submitted now, assuming that nobody else uses the slots."""
        return self._backlog.wait_s()

    def close(self, *, cancel: bool = False) -> None:
        """Wait for open jobs, or cancel them. Idempotent.

        Args:
            cancel: cancel open jobs instead of waiting.
        """
        with self._changed:
            self._is_closed = True
            futures = list(self._open) if cancel else []
        for future in reversed(futures):  # newest first: cancelling a running one would start a waiting one
            future.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
        self._lane.join()

    # Sending ---------------------------------------------------------------------------------------------------------

    def _send(self, call: _RemoteCall) -> None:
        with self._changed:
            known = set(self._known) if call.attempts == 0 else set()
            is_warm = len(self._holders) >= self.slots
        call.attempts += 1
        try:
            packed, contents = pack(call.job, known, is_same_machine=False)
            name = "warm-up of evaluations" if call.job.is_warm_up else f"evaluation of step {call.job.step}"
            pending = evaluate(packed, contents, call.job.state).with_options(name=name)
            if call.job.timeout_s is not None:
                pending = pending.with_timeout(call.job.timeout_s + (0.0 if is_warm else self._start_s))
            inner = self._context.copy().run(self.target.submit, pending)
        except BaseException as error:  # pickling runs user code, and the pool may be closed
            self._end(call, error=error)
            return
        with self._changed:
            call.inner = inner
            is_open = call.future in self._open
        if not is_open:  # cancelled meanwhile
            inner.cancel()
        inner.add_done_callback(lambda ended: self._arrived(call, ended))

    def _arrived(self, call: _RemoteCall, inner: Future[Any]) -> None:
        now = time.time()
        self._lane.put(lambda: self._receive(call, inner, now))

    # Receiving -------------------------------------------------------------------------------------------------------

    def _receive(self, call: _RemoteCall, inner: Future[Any], now: float) -> None:
        try:
            reply: Reply = inner.result()
        except CancelledError:
            lost = NodeError(
                f"{self.name}: the evaluation of step {call.job.step} was cancelled; keep its pool open until it ends"
            )
            self._end(call, error=lost)
            return
        except BaseException as error:  # anything that the evaluation raised
            self._lost_track(error)
            self._end(call, error=error)
            return
        if reply.scored is None:
            self._send_again(call, reply)
            return
        with self._changed:
            self._holders.add(reply.holder)
            self._known.update(getattr(call.job, part).digest for part in PARTS)
        self._end(call, outcome=self._outcome(call, reply, now))

    def _outcome(self, call: _RemoteCall, reply: Reply, now: float) -> Outcome:
        """Build the outcome by this process's clock: durations from the worker, the end when it was known here."""
        scored = reply.scored
        assert scored is not None
        started_at = now - (scored.finished_at - scored.started_at)
        return Outcome(
            value=scored.value,
            worker=self.name if reply.node is None else f"node {reply.node}",
            started_at=started_at,
            finished_at=now,
            load_s=scored.loaded_at - scored.started_at,
            transfer_s=max(0.0, started_at - call.sent_at) if call.is_first_in_line else 0.0,
        )

    def _send_again(self, call: _RemoteCall, reply: Reply) -> None:
        with self._changed:
            self._known.difference_update(reply.missing)
            is_open = call.future in self._open
        if not is_open:
            return
        if call.attempts >= _TRIES:
            self._end(call, error=InternalError(f"{self.name}: a worker lacks contents it was sent; report this bug"))
            return
        self._send(call)

    def _lost_track(self, error: BaseException) -> None:
        """Forget the known slot processes, because one of them was killed and its successor is cold."""
        if isinstance(error, (NodeError, TaskTimeout)):
            with self._changed:
                self._holders.clear()

    def _end(self, call: _RemoteCall, *, outcome: Outcome | None = None, error: BaseException | None = None) -> None:
        with self._changed:
            if self._open.pop(call.future, None) is None:
                return
            self._backlog.end(call.future, is_typical=outcome is not None and not call.job.is_warm_up)
            self._changed.notify_all()
        if outcome is not None:
            settle(call.future, outcome)
        elif error is not None:
            settle_error(call.future, error)

    def _cancelled(self, future: Future[Any]) -> None:
        with self._changed:
            call = self._open.pop(future, None)
            if call is None:
                return
            self._backlog.end(future, is_typical=False)
            self._holders.clear()  # a slot that ignores the interruption is killed, so a successor may be cold
            self._changed.notify_all()
            inner = call.inner
        if inner is not None:
            inner.cancel()


@dataclass(eq=False)
class _RemoteCall:
    job: Job
    future: Future[Outcome]
    inner: Future[Any] | None = None
    attempts: int = 0
    sent_at: float = field(default_factory=time.time)
    is_first_in_line: bool = True
    """True if no other job was ahead of it, so the time before its start is transfer."""


def _name_of(target: Any) -> str:
    numbers = getattr(target, "node_numbers", ())
    if hasattr(target, "provider") or not numbers:  # a whole pool, or a user's target
        return "pool"
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _slots_of(target: Any) -> int:
    """Return the number of slots; inside a task a pool only knows its nodes, which count as one slot each."""
    slots = getattr(target, "total_slots", None)
    return max(1, len(getattr(target, "node_numbers", ())) if slots is None else int(slots))
