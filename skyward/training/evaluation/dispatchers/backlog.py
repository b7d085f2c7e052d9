"""Estimate of how long a job would wait for its turn. Pure, with an injected clock."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Hashable


class MovingAverage:
    """Exponential moving average without start-up bias: after one observation it equals that observation.

    Args:
        beta: weight of the past, 0 <= beta < 1.

    Source: Kingma and Ba, "Adam", 2014, section 3.
    """

    def __init__(self, beta: float) -> None:
        self._beta, self._sum, self._weight = beta, 0.0, 0.0

    def add(self, value: float) -> None:
        self._sum = self._beta * self._sum + (1 - self._beta) * value
        self._weight = self._beta * self._weight + (1 - self._beta)

    @property
    def value(self) -> float | None:
        """Current average; None before the first observation."""
        return self._sum / self._weight if self._weight else None


class Backlog:
    """Open jobs of one worker, which runs `slots` of them at once in order of arrival. Thread-safe.

    It measures the jobs itself, so that all costs count, also the transfer of the state.

    Args:
        slots: jobs at once, >= 1.
        beta: weight of the past in the average duration, 0 <= beta < 1.
        initial_s: estimate of a job's seconds before the first has ended, > 0.
        clock: monotonic seconds.
    """

    def __init__(
        self, slots: int = 1, *, beta: float = 0.9, initial_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.slots = slots
        self.initial_s, self._clock = initial_s, clock
        self._seconds = MovingAverage(beta)
        self._running: dict[Hashable, float] = {}
        self._queued: dict[Hashable, None] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of open jobs."""
        with self._lock:
            return len(self._running) + len(self._queued)

    @property
    def expected_s(self) -> float:
        """Expected seconds of a job."""
        average = self._seconds.value
        return self.initial_s if average is None else average

    def add(self, job: Hashable) -> None:
        """Note a job that was submitted now."""
        with self._lock:
            if len(self._running) < self.slots:
                self._running[job] = self._clock()
            else:
                self._queued[job] = None

    def end(self, job: Hashable, *, is_typical: bool = True) -> float | None:
        """Note a job that has ended, and begin the next one. Ignores a job that is not open.

        Args:
            job: the job.
            is_typical: False if its duration does not predict the next ones (it was cancelled, or failed early).

        Returns:
            The seconds that it ran; None if it had not begun.
        """
        with self._lock:
            if job in self._queued:
                del self._queued[job]
                return None
            began = self._running.pop(job, None)
            if began is None:
                return None
            now = self._clock()
            if is_typical:
                self._seconds.add(now - began)
            if self._queued:
                following = next(iter(self._queued))
                del self._queued[following]
                self._running[following] = now
            return now - began

    def wait_s(self) -> float:
        """Return the seconds until a job that came now would begin; 0.0 means at once."""
        return self.free_s()[0]

    def free_s(self) -> list[float]:
        """Return the seconds until each slot has done its open jobs, the next free one first; 0.0 means free.

        A job that runs longer than expected is expected to overrun by as much again, so a worker that hangs looks worse
        the longer it hangs.
        """
        with self._lock:
            expected, now = self.expected_s, self._clock()
            slots = [abs(expected - (now - began)) for began in self._running.values()]
            slots += [0.0] * (self.slots - len(slots))
            heapq.heapify(slots)
            for _ in self._queued:
                heapq.heapreplace(slots, slots[0] + expected)
            return slots
