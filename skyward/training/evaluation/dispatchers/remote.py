"""Evaluations on the nodes of a pool."""

from __future__ import annotations

import contextvars
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....calls.compute import PendingCompute
from ....core.bounds import is_positive
from ....errors import InternalError, NodeError, TaskTimeout, UsageError
from ..dispatcher import Job, Outcome
from ..pipeline import Lane
from .backlog import Backlog
from .futures import new_future, settle, settle_error
from .packed import PARTS, pack
from .remote_worker import Reply, evaluate

__all__ = ["PoolDispatcher", "RemoteTarget"]

_TRIES = 4
"""How often a job is sent to workers that say they lack contents. From the second time on it carries all of them."""


class RemoteTarget(Protocol):
    """A pool, or some of its nodes. `total_slots`, where it has one, is how many calls run there at once."""

    def submit(self, pending: PendingCompute[Any]) -> Future[Any]: ...


class PoolDispatcher:
    """Runs evaluations as calls to a pool, or to some of its nodes. Thread-safe. The pool is the user's to close.

    Large tensors, arrays and contents go as blobs, which a node is sent once; contents are unpickled once in each slot,
    and models stay there. An evaluation that is cancelled or runs too long is interrupted, and its slot is killed if
    that does not help. One whose slot or node is lost fails with SlotLost or NodeLost.

    Args:
        target: where calls go.
        name: for records and pictures; workers are named by their node. None: what the target calls itself.
        start_s: seconds >= 0 that the first evaluation in a slot gets beyond its `timeout_s`, as that slot imports
            what it needs.

    Raises: UsageError.
    """

    shares_memory = False

    def __init__(self, target: RemoteTarget, *, name: str | None = None, start_s: float = 60.0) -> None:
        if not is_positive(start_s, or_zero=True):
            raise UsageError(f"start_s: {start_s!r}; it is a number of seconds >= 0")
        self.target = target
        self.name = name or _name_of(target)
        self._start_s = float(start_s)
        self._context = contextvars.copy_context()
        """Of who made it: a target that is used in a task of a pool asks which task that is."""
        self.slots = _slots_of(target)
        self._backlog = Backlog(self.slots)
        self._known: set[str] = set()
        """Digests of contents that some worker has. One that has not says so, and gets them."""
        self._holders: set[str] = set()
        """Slots' processes that have answered, of those that are there as far as is known."""
        self._open: dict[Future[Any], _RemoteCall] = {}
        self._lane = Lane("skyward-evaluation")
        """Unpickles what comes back: not the threads that bring it, which must not wait for an import."""
        self._is_closed = False
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<PoolDispatcher {self.name!r}>"

    @property
    def is_elsewhere(self) -> bool:
        """Whether its nodes are other machines than this one, as far as their provider's name tells."""
        pool = getattr(self.target, "pool", self.target)
        return getattr(getattr(pool, "provider", None), "name", "local") != "local"

    def submit(self, job: Job) -> Future[Outcome]:
        """Sends it; the state is copied when this returns.

        Raises: UsageError: it is closed. The future raises what the evaluation raised, TaskTimeout, NodeError,
        PoolClosed, ArgumentNotPicklable.
        """
        call = _RemoteCall(job, new_future(self._cancelled))
        with self._changed:
            if self._is_closed:
                raise UsageError(f"{self!r} is closed; submit before close()")
            self._open[call.future] = call
            call.is_first_in_line = self._backlog.wait_s() == 0.0
            self.slots = self._backlog.slots = _slots_of(self.target)  # a pool may have changed its size
            self._backlog.add(call.future)
        self._send(call)
        return call.future

    def pressure(self) -> float:
        """Seconds that a job would wait if it were submitted now, if nobody else used these slots."""
        return self._backlog.wait_s()

    def close(self, *, cancel: bool = False) -> None:
        """Waits for what is open, or cancels it. Idempotent."""
        with self._changed:
            self._is_closed = True
            futures = list(self._open) if cancel else []
        for future in reversed(futures):  # or those that wait would begin
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
        except BaseException as error:  # pickling is user code, and a pool may be closed
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
            lost = NodeError(f"{self.name}: the call of the evaluation of step {call.job.step} was cancelled")
            self._end(call, error=lost)
            return
        except BaseException as error:  # whatever the evaluation raised
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
        """By this process's clock: durations come from the worker, the end is when it was known here."""
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
            self._end(call, error=InternalError(f"{self.name}: a worker lacks contents that it was sent"))
            return
        self._send(call)

    def _lost_track(self, error: BaseException) -> None:
        """Which processes are there is not known when one of them was ended."""
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
            self._holders.clear()  # what does not heed the interruption is killed
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
    """It began as soon as it was there."""


def _name_of(target: Any) -> str:
    numbers = getattr(target, "node_numbers", ())
    if hasattr(target, "provider") or not numbers:  # a whole pool, or a target of the user's
        return "pool"
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _slots_of(target: Any) -> int:
    """Of what a pool becomes in a task only the nodes are known: one for each, at least."""
    slots = getattr(target, "total_slots", None)
    return max(1, len(getattr(target, "node_numbers", ())) if slots is None else int(slots))
