"""Evaluations in threads of this process: nothing is pickled, and a state is read where it is.

They share the processor, and the GIL, with training. Where evaluations compute much, measure (`gate="auto"`).
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ....errors import TaskTimeout, UsageError
from ..dispatcher import Job, Outcome
from ..worker import Worker
from .backlog import Backlog
from .futures import new_future, settle, settle_error

__all__ = ["InProcessDispatcher"]


class InProcessDispatcher:
    """Runs evaluations in threads of this process, each with models of its own. Thread-safe.

    Threads live while there is something to do. A thread cannot be killed: one whose evaluation was cancelled or ran
    out of time is left alone with its model, counts no more, and ends when its evaluation does.

    Args:
        slots: evaluations at once, >= 1.
        name: for records and pictures.

    Raises: UsageError.
    """

    shares_memory = True

    def __init__(self, *, slots: int = 1, name: str = "in-process") -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise UsageError(f"slots: {slots!r}; it is a whole number >= 1")
        self.name, self.slots = name, slots
        self._backlog = Backlog(slots)
        self._queue: deque[_Task] = deque()
        self._running: dict[Future[Any], _Task] = {}
        self._workers = [Worker() for _ in range(slots)]
        """Of the seats that are free."""
        self._threads: set[threading.Thread] = set()
        """Without those that were given up."""
        self._is_closed = False
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<InProcessDispatcher slots={self.slots}>"

    def submit(self, job: Job) -> Future[Outcome]:
        """Raises: UsageError: it is closed. The future raises what the evaluation raised, or TaskTimeout."""
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
            open_tasks = [*self._queue, *self._running.values()] if cancel else []
        for task in open_tasks:
            task.future.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._running)
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join()

    # -----------------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Starts a thread where a seat is free. Under the lock."""
        if self._queue and self._workers:
            thread = threading.Thread(
                target=self._serve, args=(self._workers.pop(),), name="skyward-evaluation", daemon=True
            )
            self._threads.add(thread)
            thread.start()

    def _serve(self, worker: Worker) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                if not self._queue:
                    self._workers.append(worker)
                    self._threads.discard(me)
                    return
                task = self._queue.popleft()
                self._running[task.future] = task
                task.thread = me
            if not self._run(task, worker):
                return

    def _run(self, task: _Task, worker: Worker) -> bool:
        """False: it was given up meanwhile, and another thread has this one's seat."""
        job = task.job
        clock = None if job.timeout_s is None else threading.Timer(job.timeout_s, self._expire, (task,))
        if clock is not None:
            clock.daemon = True
            clock.start()
        outcome: Outcome | None = None
        error: BaseException | None = None
        try:
            scored = worker.run(
                factory=job.factory.value,
                load=job.load.value,
                eval_fn=job.eval_fn.value,
                payload=job.payload.value,
                cache_key=job.cache_key,
                state=job.state,
            )
            outcome = Outcome(
                value=scored.value,
                worker=self.name,
                started_at=scored.started_at,
                finished_at=scored.finished_at,
                load_s=scored.loaded_at - scored.started_at,
            )
        except BaseException as raised:  # whatever the user's function raises is the future's
            error = raised
        if clock is not None:
            clock.cancel()
            clock.join()
        with self._changed:
            if self._running.pop(task.future, None) is None:
                return False
            self._backlog.end(task.future, is_typical=error is None)
            self._changed.notify_all()
        if outcome is not None:
            settle(task.future, outcome)
        elif error is not None:
            settle_error(task.future, error)
        return True

    def _expire(self, task: _Task) -> None:
        if self._forget(task.future):
            seconds = task.job.timeout_s or 0.0
            settle_error(
                task.future,
                TaskTimeout(
                    f"{self.name}: the evaluation of step {task.job.step} ran longer than its timeout_s of "
                    f"{seconds:g} s; it goes on in a thread that counts no more, as a thread cannot be ended",
                    timeout_s=seconds,
                ),
            )

    def _forget(self, future: Future[Any]) -> bool:
        """Gives up an open job: its seat is free. False: it was not open."""
        with self._changed:
            for queued in self._queue:
                if queued.future is future:
                    self._queue.remove(queued)
                    break
            else:
                task = self._running.pop(future, None)
                if task is None:
                    return False
                if task.thread is not None:
                    self._threads.discard(task.thread)
                self._workers.append(Worker())  # the old one's model is still in use
            self._backlog.end(future, is_typical=False)
            self._changed.notify_all()
            self._fill()
        return True


@dataclass(eq=False)
class _Task:
    job: Job
    future: Future[Outcome]
    thread: threading.Thread | None = None
