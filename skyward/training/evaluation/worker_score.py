"""What AdaptiveCompute knows of each worker. Pure, with an injected clock."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from .dispatchers.backlog import Backlog, MovingAverage

__all__ = ["Drift", "WorkerScore", "median_s"]

DRIFT_BEGINS, DRIFT_ENDS = 1.5, 1.1
"""Ratios of the fast average to the slow one."""
DRIFT_FACTOR = 5.0
_FAST, _SLOW = 0.5, 0.95
"""Weights of what was before."""
_NOISE_S = 0.01
_PROBE_NOISE_S = 0.05
"""Differences of averages that mean nothing."""
FORGET_S = 300.0
FORGET_FACTOR = 5.0
"""The latency of an idle worker counts half after five times as long, and after 300 s at the latest, so that the worker
is tried again. A retry may cost one slow evaluation, so the pause grows with the latency."""
_DRIFT_FORGET_S = 30.0
_PAUSE_S = 1.0, 60.0
"""A worker that failed is left alone so long the first time, and at most."""
_HOPE = 0.99
"""How a worker that is not known yet is rated beside the best that is."""
_KEPT = 100
"""Evaluations whose times are kept for the threshold."""


class Drift:
    """Whether what is observed has become slower than it was: the ratio of a fast average to a slow one."""

    def __init__(self, noise_s: float) -> None:
        self._noise_s = noise_s
        self._fast, self._slow = MovingAverage(_FAST), MovingAverage(_SLOW)
        self.is_on = False

    def add(self, seconds: float) -> None:
        self._fast.add(seconds)
        self._slow.add(seconds)
        fast, slow = self._fast.value or 0.0, self._slow.value or 0.0
        if fast <= DRIFT_ENDS * slow:
            self.is_on = False
        elif fast >= DRIFT_BEGINS * slow and fast - slow >= self._noise_s:
            self.is_on = True


class WorkerScore:
    """One worker, as seen from here. Thread-safe where it is changed under one lock.

    Args:
        slots: evaluations that it runs at once, >= 1.
        beta1, beta2: weights of what was before, in the averages of latency and of its variance, in [0, 1).
        initial_s: seconds that an evaluation is taken to last before one was seen, > 0.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        slots: int = 1,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        initial_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._initial_s = initial_s
        self._backlog = Backlog(slots, beta=beta1, initial_s=initial_s, clock=clock)
        self._variance = MovingAverage(beta2)
        self._round_trip = MovingAverage(beta1)
        self._drift, self._probe_drift = Drift(_NOISE_S), Drift(_PROBE_NOISE_S)
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._seen_at = clock()
        self._suspended_until = -math.inf
        self._pause_s = _PAUSE_S[0]
        self.failures = 0
        self.strikes = 0
        """Failures since the last time that something went well."""

    # What happens ----------------------------------------------------------------------------------------------------

    def resize(self, slots: int) -> None:
        """Set how many evaluations it runs at once: a pool may have changed its size."""
        self._backlog.slots = slots

    def add(self, job: Hashable) -> None:
        """It was sent now."""
        self._backlog.add(job)

    def end(self, job: Hashable, *, is_typical: bool) -> None:
        """It has ended. is_typical: how long it took says something of the next ones."""
        before = self._backlog.expected_s if self._recent else None
        seconds = self._backlog.end(job, is_typical=is_typical)
        if seconds is None or not is_typical:
            return
        self._recent.append(seconds)
        self._variance.add(0.0 if before is None else (seconds - before) ** 2)
        self._drift.add(seconds)
        self._seen_at = self._clock()

    def answered(self, seconds: float) -> None:
        """A call that does nothing came back after so long. It says how far away the worker is, and that it lives."""
        self._round_trip.add(seconds)
        self._probe_drift.add(seconds)
        if not self._recent:
            self._backlog.initial_s = self._initial_s + (self._round_trip.value or 0.0)
            self._seen_at = self._clock()
        self.went_well()

    def went_well(self) -> None:
        self.strikes = 0
        self._suspended_until, self._pause_s = -math.inf, _PAUSE_S[0]

    def failed(self, max_strikes: int = 1) -> None:
        """The worker itself failed. After so many times in a row it is left alone for a while, longer each time."""
        self.failures += 1
        self.strikes += 1
        if self.strikes >= max_strikes:
            self._suspended_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])

    # How it looks ----------------------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """Jobs that were sent and have not ended."""
        return len(self._backlog)

    @property
    def idle_slots(self) -> int:
        return max(0, self._backlog.slots - len(self._backlog))

    @property
    def latency_s(self) -> float:
        """Seconds that an evaluation is expected to last."""
        return self._backlog.expected_s

    @property
    def deviation_s(self) -> float:
        """Standard deviation of the latency; 0.0 before two were seen."""
        return math.sqrt(self._variance.value or 0.0)

    @property
    def round_trip_s(self) -> float | None:
        """Of calls that do nothing; None: there was none."""
        return self._round_trip.value

    @property
    def is_suspended(self) -> bool:
        return self._clock() < self._suspended_until

    @property
    def suspended_until(self) -> float:
        return self._suspended_until

    @property
    def is_drifting(self) -> bool:
        """It has become slower than it was, and that is not long ago."""
        return (self._drift.is_on or self._probe_drift.is_on) and self._drift_factor() > 1.5

    def quantile_s(self, share: float) -> float | None:
        """Of the evaluations that were seen lately. None: there were none."""
        if not self._recent:
            return None
        ordered = sorted(self._recent)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    def free_s(self) -> list[float]:
        """Seconds until each slot is free, the next one first; infinite while the worker is suspended."""
        if self.is_suspended:
            return [math.inf] * self._backlog.slots
        factor = self._drift_factor()
        return [seconds * factor for seconds in self._backlog.free_s()]

    @property
    def is_known(self) -> bool:
        """Whether it has run an evaluation."""
        return bool(self._recent)

    def cost_s(self, least_s: float = math.inf) -> float:
        """Seconds that a job is taken to last, for comparison with other workers: less is better.

        Args:
            least_s: the least latency of all known workers. An unknown worker is taken to be a little better, so that
                it becomes known.
        """
        latency_s = self.latency_s if self.is_known else min(self.latency_s, _HOPE * least_s)
        return latency_s * self._drift_factor()

    @property
    def confidence(self) -> float:
        """Weight of the latency, in (0, 1]: 1 while the worker is used, less and less while it is idle."""
        half_life_s = min(FORGET_S, FORGET_FACTOR * self.latency_s)
        if self.open or not self.is_known or half_life_s <= 0:
            return 1.0
        return float(0.5 ** ((self._clock() - self._seen_at) / half_life_s))

    def _drift_factor(self) -> float:
        if not (self._drift.is_on or self._probe_drift.is_on):
            return 1.0
        age = self._clock() - self._seen_at
        return 1.0 + (DRIFT_FACTOR - 1.0) * float(0.5 ** (age / _DRIFT_FORGET_S))


def median_s(scores: Sequence[WorkerScore]) -> float:
    """Of their latencies."""
    return statistics.median(score.latency_s for score in scores)
