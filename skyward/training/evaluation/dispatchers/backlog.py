"""How long a job would wait for its turn, as far as that can be told. Pure, with an injected clock."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Hashable

__all__ = ["MovingAverage", "Backlog"]


class MovingAverage:
    """An exponential moving average without the bias of its start: after one observation it is that observation.

    Args:
        beta: weight of what was before, 0 <= beta < 1.

    Source: Kingma and Ba, "Adam", 2014, section 3.
    """

    def __init__(self, beta: float) -> None:
        self._beta, self._sum, self._weight = beta, 0.0, 0.0

    def add(self, value: float) -> None:
        self._sum = self._beta * self._sum + (1 - self._beta) * value
        self._weight = self._beta * self._weight + (1 - self._beta)

    @property
    def value(self) -> float | None:
        """None: nothing was observed."""
        return self._sum / self._weight if self._weight else None


class Backlog:
    """The open jobs of one worker, which runs `slots` of them at a time in the order in which they came. Thread-safe.

    It times them itself, so that whatever a job costs its worker counts, the transfer of its state too.

    Args:
        slots: >= 1.
        initial_s: seconds that a job is taken to run as long as none has ended, > 0.
        clock: seconds that never go back.
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
        """Jobs that are open."""
        with self._lock:
            return len(self._running) + len(self._queued)

    @property
    def expected_s(self) -> float:
        """Seconds that a job is expected to run."""
        seen = self._seconds.value
        return self.initial_s if seen is None else seen

    def add(self, job: Hashable) -> None:
        """It was submitted now."""
        with self._lock:
            if len(self._running) < self.slots:
                self._running[job] = self._clock()
            else:
                self._queued[job] = None

    def end(self, job: Hashable, *, is_typical: bool = True) -> float | None:
        """It has ended; the next one begins. A job that is not open is ignored.

        Args:
            is_typical: False: how long it ran says nothing of the next ones (it was cancelled, or failed early).

        Returns: seconds that it ran; None if it had not begun.
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
        """Seconds until a job that came now would begin; 0.0: at once."""
        return self.free_s()[0]

    def free_s(self) -> list[float]:
        """Seconds until each slot has done what is open, the next free one first; 0.0: it is free.

        A job that runs longer than expected is expected to overrun as much again: a worker that hangs looks worse and
        worse.
        """
        with self._lock:
            expected, now = self.expected_s, self._clock()
            slots = [abs(expected - (now - began)) for began in self._running.values()]
            slots += [0.0] * (self.slots - len(slots))
            heapq.heapify(slots)
            for _ in self._queued:
                heapq.heapreplace(slots, slots[0] + expected)
            return slots
