"""Virtual time, which passes only in `sleep`: hours of leases and boots take milliseconds, and repeat exactly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class VirtualClock:
    """Clock for tests. `sleep` returns at once and advances the time.

    Thread-safe. `on_sleep` is called after each advance.

    Args:
        start: first value of `monotonic`, in seconds.
        skew_s: error of `time()`, in seconds. It shows whether code depends on wall-clock time.

    Example:
        >>> clock = VirtualClock(start=0.0)
        >>> clock.sleep(3600)
        >>> clock.monotonic()
        3600.0
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
    """Real time, accelerated by a factor, for fakes that run beside real processes.

    Args:
        factor: how many times faster `monotonic` and `sleep` run than real time.

    Example:
        cloud = FakeCloud(FastClock(50.0))
    """

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
