"""Time that passes only when somebody sleeps: hours of leases and boots in milliseconds, the same each time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["FastClock", "VirtualClock"]


class VirtualClock:
    """A Clock for tests. `sleep` returns at once and moves time; `on_sleep` is called behind each move.

    Thread-safe. `skew_s` is how wrong `time()` is: what depends on it should not depend on it.
    """

    def __init__(self, *, start: float = 1_000_000.0, skew_s: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self.skew_s = skew_s
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now + self.skew_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += max(0.0, seconds)
        self.on_sleep()

    def __repr__(self) -> str:
        return f"VirtualClock(at {self._now:g} s)"


class FastClock:
    """Real time, `factor` times as fast: for fakes that stand beside real processes."""

    def __init__(self, factor: float = 50.0) -> None:
        self._factor = factor

    def monotonic(self) -> float:
        return time.monotonic() * self._factor

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / self._factor)

    def __repr__(self) -> str:
        return f"FastClock({self._factor:g})"
