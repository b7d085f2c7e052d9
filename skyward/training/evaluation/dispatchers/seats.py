"""A queue of jobs before a few seats, each of which runs one at a time: what dispatchers on this machine share."""

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

__all__ = ["Seat", "SeatedDispatcher"]


class Seat(abc.ABC):
    """Runs one job at a time. Used by one thread; `give_up` and `close` may come from any other.

    number: which seat of its dispatcher it is, from 0.
    """

    ends_when_given_up = False
    """Whether `run` returns soon after `give_up`."""

    def __init__(self, number: int) -> None:
        self.number = number

    @abc.abstractmethod
    def run(self, job: Job, began: Callable[[], None]) -> Outcome:
        """Waits for what comes of it. Raises what it raised.

        began: to be called when everything is there that the evaluation needs but its model: its time runs from then.
        """

    @abc.abstractmethod
    def give_up(self) -> str:
        """Nobody waits for the running job any more, and nothing more is sent here. Says what becomes of the job."""

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing runs here, and nothing more is sent."""


class SeatedDispatcher(abc.ABC):
    """Runs jobs in the order in which they come, `slots` of them at once, each on a seat of its own. Thread-safe.

    Its threads live while there is something to do.

    Args:
        slots: evaluations at once, >= 1.
        name: for records and pictures.

    Raises: UsageError.
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
        """Without those whose job was given up, and that may never end."""
        self._is_closed = False
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} slots={self.slots}>"

    @abc.abstractmethod
    def _new_seat(self, number: int) -> Seat:
        """A seat, new or in the place of one that was given up. Starts nothing."""

    def submit(self, job: Job) -> Future[Outcome]:
        """Raises: UsageError: it is closed. The future raises what the evaluation raised, TaskTimeout, SlotLost."""
        future = new_future(self._forget)
        with self._changed:
            if self._is_closed:
                raise UsageError(f"{self!r} is closed; submit before close()")
            self._queue.append(_Task(job, future))
            self._backlog.add(future)
            self._fill()
        return future

    def pressure(self) -> float:
        """Seconds that a job would wait if it were submitted now."""
        return self._backlog.wait_s()

    def close(self, *, cancel: bool = False) -> None:
        """Waits for what is open, or cancels it. Idempotent."""
        with self._changed:
            self._is_closed = True
            open_tasks = [*self._running.values(), *self._queue] if cancel else []
        for task in reversed(open_tasks):  # or those that wait would begin
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

    # -----------------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Starts a thread where a seat is free. Under the lock."""
        if self._queue and self._free:
            thread = threading.Thread(
                target=self._serve, args=(self._free.pop(),), name="skyward-evaluation", daemon=True
            )
            self._threads.add(thread)
            thread.start()

    def _serve(self, seat: Seat) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                if not self._queue:
                    self._free.append(seat)
                    self._threads.discard(me)
                    return
                task = self._queue.popleft()
                self._running[task.future] = task
                task.seat, task.thread = seat, me
            if not self._run(task, seat):
                seat.close()
                with self._changed:
                    self._threads.discard(me)
                return

    def _run(self, task: _Task, seat: Seat) -> bool:
        """False: it was given up meanwhile, and another seat is in the place of this one."""
        timer = _Timer(task.job.timeout_s, lambda: self._expire(task))
        outcome: Outcome | None = None
        error: BaseException | None = None
        try:
            outcome = seat.run(task.job, timer.start)
        except BaseException as raised:  # whatever the user's function raises is the future's
            error = raised
        timer.stop()
        with self._changed:
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
        what = self._forget(task.future)
        if what is not None:
            seconds = task.job.timeout_s or 0.0
            settle_error(
                task.future,
                TaskTimeout(
                    f"{self.name}: the evaluation of step {task.job.step} ran longer than its timeout_s of "
                    f"{seconds:g} s; {what}",
                    timeout_s=seconds,
                ),
            )

    def _forget(self, future: Future[Any]) -> str | None:
        """Gives up an open job. None: it was not open. Otherwise what becomes of it."""
        with self._changed:
            task = self._running.pop(future, None)
            if task is None:
                queued = next((task for task in self._queue if task.future is future), None)
                if queued is None:
                    return None
                self._queue.remove(queued)
                what = "it had not begun"
            else:
                assert task.seat is not None
                assert task.thread is not None
                if not task.seat.ends_when_given_up:
                    self._threads.discard(task.thread)
                what = task.seat.give_up()
                self._free.append(self._new_seat(task.seat.number))
            self._backlog.end(future, is_typical=False)
            self._changed.notify_all()
            self._fill()
        return what


@dataclass(eq=False)
class _Task:
    job: Job
    future: Future[Outcome]
    seat: Seat | None = None
    thread: threading.Thread | None = None


class _Timer:
    """Calls `expired` once, `timeout_s` after it was started, unless it is stopped before."""

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
