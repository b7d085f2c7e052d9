"""Measurements of one worker for AdaptiveCompute. Pure, with an injected clock."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from .dispatchers.backlog import Backlog, MovingAverage

DRIFT_BEGINS, DRIFT_ENDS = 1.5, 1.1
"""Ratios of the fast average to the slow one at which a drift begins and ends."""
DRIFT_FACTOR = 5.0
_FAST, _SLOW = 0.5, 0.95
"""Weights of the past in the two averages."""
_NOISE_S = 0.01
_PROBE_NOISE_S = 0.05
"""Differences of averages, in seconds, that are noise."""
FORGET_S = 300.0
FORGET_FACTOR = 5.0
"""Half-life of an idle worker's latency: five times the latency, and 300 s at most, so that it is tried again.

A retry may cost one slow evaluation, so the pause grows with the latency.
"""
_DRIFT_FORGET_S = 30.0
_PAUSE_S = 1.0, 60.0
"""Seconds of a failed worker's first suspension, and of the longest."""
_HOPE = 0.99
"""Rating of an unknown worker as a share of the best known latency."""
_KEPT = 100
"""Number of recent evaluations that the threshold is computed from."""


class Drift:
    """Detector of a slowdown, by the ratio of a fast average to a slow one."""

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
    """Measurements of one worker. Thread-safe if all changes happen under one lock.

    Args:
        slots: evaluations that it can run at once, >= 1.
        beta1: weight of the past in the average latency, in [0, 1).
        beta2: weight of the past in the latency's variance, in [0, 1).
        initial_s: estimate of an evaluation's seconds before the first, > 0.
        clock: monotonic seconds.
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
        """Failures since the last success."""

    # Changes ---------------------------------------------------------------------------------------------------------

    def resize(self, slots: int) -> None:
        """Set the number of slots, because a pool may change its size."""
        self._backlog.slots = slots

    def add(self, job: Hashable) -> None:
        """Note that a job was sent."""
        self._backlog.add(job)

    def end(self, job: Hashable, *, is_typical: bool) -> None:
        """Note that a job has ended; `is_typical` says whether its duration predicts the next ones."""
        before = self._backlog.expected_s if self._recent else None
        seconds = self._backlog.end(job, is_typical=is_typical)
        if seconds is None or not is_typical:
            return
        self._recent.append(seconds)
        self._variance.add(0.0 if before is None else (seconds - before) ** 2)
        self._drift.add(seconds)
        self._seen_at = self._clock()

    def answered(self, seconds: float) -> None:
        """Note a probe's round trip, which shows the distance of the worker and that it lives."""
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
        """Note a failure of the worker; after `max_strikes` in a row it is suspended, longer each time."""
        self.failures += 1
        self.strikes += 1
        if self.strikes >= max_strikes:
            self._suspended_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """Jobs that were sent and have not ended."""
        return len(self._backlog)

    @property
    def idle_slots(self) -> int:
        return max(0, self._backlog.slots - len(self._backlog))

    @property
    def latency_s(self) -> float:
        """Expected seconds of an evaluation."""
        return self._backlog.expected_s

    @property
    def deviation_s(self) -> float:
        """Standard deviation of the latency; 0.0 before two were seen."""
        return math.sqrt(self._variance.value or 0.0)

    @property
    def round_trip_s(self) -> float | None:
        """Average seconds of calls that do nothing; None before the first."""
        return self._round_trip.value

    @property
    def is_suspended(self) -> bool:
        return self._clock() < self._suspended_until

    @property
    def suspended_until(self) -> float:
        return self._suspended_until

    @property
    def is_drifting(self) -> bool:
        """Return whether it has become slower than it was, and recently so."""
        return (self._drift.is_on or self._probe_drift.is_on) and self._drift_factor() > 1.5

    def quantile_s(self, share: float) -> float | None:
        """Return a quantile of the recent evaluations' seconds, or None without any."""
        if not self._recent:
            return None
        ordered = sorted(self._recent)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    def free_s(self) -> list[float]:
        """Return the seconds until each slot is free, the next first; infinite while the worker is suspended."""
        if self.is_suspended:
            return [math.inf] * self._backlog.slots
        factor = self._drift_factor()
        return [seconds * factor for seconds in self._backlog.free_s()]

    @property
    def is_known(self) -> bool:
        """Return whether it has finished an evaluation."""
        return bool(self._recent)

    def cost_s(self, least_s: float = math.inf) -> float:
        """Return the expected seconds of a job, for comparison with other workers; less is better.

        Args:
            least_s: lowest latency of all known workers. An unknown worker is rated slightly better, so that it becomes
                known.
        """
        latency_s = self.latency_s if self.is_known else min(self.latency_s, _HOPE * least_s)
        return latency_s * self._drift_factor()

    @property
    def confidence(self) -> float:
        """Weight of the latency, in (0, 1]: 1 while the worker is in use, decaying while it is idle."""
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
    """Return the median of the workers' latencies."""
    return statistics.median(score.latency_s for score in scores)
