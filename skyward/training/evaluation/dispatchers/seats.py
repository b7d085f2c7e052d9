"""Queue of jobs for a few seats, each of which runs one job at a time; base of the dispatchers on this machine."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ....errors import TaskTimeout, UsageError
from ..dispatcher import Job, Outcome
from ..legal import check_at_least
from .backlog import Backlog
from .futures import new_future, settle, settle_error


class Seat(abc.ABC):
    """Place that runs one job at a time, used by one thread; any thread may call `give_up` and `close`.

    Args:
        number: index of the seat in its dispatcher, from 0.
    """

    ends_when_given_up = False
    """True if `run` returns soon after `give_up`."""

    def __init__(self, number: int) -> None:
        self.number = number

    @abc.abstractmethod
    def run(self, job: Job, began: Callable[[], None]) -> Outcome:
        """Run a job and return its outcome, or raise its exception.

        Args:
            job: the evaluation.
            began: called when everything except the model is there; the job's time begins then.
        """

    @abc.abstractmethod
    def give_up(self) -> str:
        """Abandon the running job and this seat; return what becomes of the job, for the error."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the seat's resources. Nothing runs here and nothing more is sent."""


class SeatedDispatcher(abc.ABC):
    """Run jobs in order of arrival, `slots` of them at once, each on its own seat. Thread-safe.

    Its threads exist only while there are jobs.

    Args:
        slots: evaluations at once, >= 1.
        name: name for records and plots.

    Raises:
        UsageError: `slots` is below 1.
    """

    shares_memory = False

    def __init__(self, *, slots: int, name: str) -> None:
        check_at_least("slots", slots, 1)
        self.name, self.slots = name, slots
        self._backlog = Backlog(slots)
        self._queue: deque[_Task] = deque()
        self._running: dict[Future[Any], _Task] = {}
        self._free: list[Seat] = [self._new_seat(number) for number in range(slots)]
        self._threads: set[threading.Thread] = set()
        """Threads to join in `close`, and some that have ended.

        Those of abandoned jobs are not among them, because they may never end.
        """
        self._is_closed = False
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} slots={self.slots}>"

    @abc.abstractmethod
    def _new_seat(self, number: int) -> Seat:
        """Create a seat, or a replacement for an abandoned one, without starting anything."""

    def submit(self, job: Job) -> Future[Outcome]:
        """Queue a job.

        The future raises the evaluation's exception, TaskTimeout or SlotLost.

        Args:
            job: the evaluation.

        Raises:
            UsageError: the dispatcher is closed.
        """
        future = new_future(self._forget)
        with self._changed:
            if self._is_closed:
                raise UsageError(f"{self!r}: is closed; submit before close()")
            self._queue.append(_Task(job, future))
            self._backlog.add(future)
            self._fill()
        return future

    def pressure(self) -> float:
        """Return the seconds that a job would wait if submitted now."""
        return self._backlog.wait_s()

    def close(self, *, cancel: bool = False) -> None:
        """Wait for open jobs, or cancel them. Idempotent.

        Args:
            cancel: cancel open jobs instead of waiting.
        """
        with self._changed:
            self._is_closed = True
            open_tasks = [*self._running.values(), *self._queue] if cancel else []
        for task in reversed(open_tasks):  # newest first: cancelling a running one would start a waiting one
            task.future.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._running)
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join()
        with self._changed:
            seats, self._free = self._free, []
        for seat in seats:
            seat.close()

    # Internals -------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start a thread if a seat is free. The caller holds the lock."""
        if self._queue and self._free:
            thread = threading.Thread(
                target=self._serve, args=(self._free.pop(),), name="skyward-evaluation", daemon=True
            )
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
            thread.start()

    def _serve(self, seat: Seat) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                if not self._queue:
                    self._free.append(seat)
                    return
                task = self._queue.popleft()
                self._running[task.future] = task
                task.seat, task.thread = seat, me
            if not self._run(task, seat):
                seat.close()
                return

    def _run(self, task: _Task, seat: Seat) -> bool:
        """Run a task; return False if it was given up meanwhile and another seat has replaced this one."""
        timer = _Timer(task.job.timeout_s, lambda: self._expire(task))
        outcome: Outcome | None = None
        error: BaseException | None = None
        try:
            outcome = seat.run(task.job, timer.start)
        except BaseException as raised:  # also SystemExit: anything that user code raises belongs to the future
            error = raised
        timer.stop()
        with self._changed:
            # One of three removes the task and then settles its future: this thread, its timeout, or a cancellation.
            if self._running.pop(task.future, None) is None:
                return False
            self._backlog.end(task.future, is_typical=error is None and not task.job.is_warm_up)
            self._changed.notify_all()
        if outcome is not None:
            settle(task.future, outcome)
        elif error is not None:
            settle_error(task.future, error)
        return True

    def _expire(self, task: _Task) -> None:
        fate = self._forget(task.future)
        if fate is not None:
            seconds = task.job.timeout_s or 0.0
            settle_error(
                task.future,
                TaskTimeout(
                    f"{self.name}: the evaluation of step {task.job.step} ran longer than its timeout_s of "
                    f"{seconds:g} s ({fate}); raise timeout_s, or use a smaller eval_dataset",
                    timeout_s=seconds,
                ),
            )

    def _forget(self, future: Future[Any]) -> str | None:
        """Give up an open job; return what becomes of it, or None if it was not open."""
        with self._changed:
            task = self._running.pop(future, None)
            if task is None:
                queued = next((task for task in self._queue if task.future is future), None)
                if queued is None:
                    return None
                self._queue.remove(queued)
                fate = "it had not begun"
            else:
                assert task.seat is not None
                assert task.thread is not None
                if not task.seat.ends_when_given_up:
                    self._threads.discard(task.thread)
                fate = task.seat.give_up()
                self._free.append(self._new_seat(task.seat.number))
            self._backlog.end(future, is_typical=False)
            self._changed.notify_all()
            self._fill()
        return fate


@dataclass(eq=False)
class _Task:
    job: Job
    future: Future[Outcome]
    seat: Seat | None = None
    thread: threading.Thread | None = None


class _Timer:
    """Timer that calls `expired` once, `timeout_s` after its start, unless it is stopped before."""

    def __init__(self, timeout_s: float | None, expired: Callable[[], None]) -> None:
        self._timer = None if timeout_s is None else threading.Timer(timeout_s, expired)

    def start(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        if self._timer is not None and self._timer.ident is not None:
            self._timer.cancel()
            self._timer.join()
