"""Injectable time, and retries with exponential backoff."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from ..errors import ProviderError

T = TypeVar("T")

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 20.0


class Clock(Protocol):
    """Time as provisioning sees it: the system's, or a test's."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment; never jumps, never goes backwards."""
        ...

    def time(self) -> float:
        """Return seconds since the epoch, by this machine's clock."""
        ...

    def sleep(self, seconds: float, /) -> None: ...


SYSTEM_CLOCK: Clock = time
"""Clock of the system."""


def patiently(
    call: Callable[[], T],
    *,
    again_on: type[ProviderError] | tuple[type[ProviderError], ...],
    clock: Clock,
    limit_s: float,
    jitter: Callable[[], float] = random.random,
) -> T:
    """Retry a call while it raises `again_on`, with exponential backoff, and return its value.

    Args:
        call: the call to retry.
        again_on: errors that are worth a retry.
        clock: source of time.
        limit_s: seconds after which the last error is raised.
        jitter: returns numbers in [0, 1). Waits double from 0.5 to 20 seconds, and each is cut to a random length
            between half and full, because clients that are throttled together must not return together.
    """
    deadline = clock.monotonic() + limit_s
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            return call()
        except again_on:
            pause_s = wait_s * (0.5 + jitter() / 2)
            if clock.monotonic() + pause_s > deadline:
                raise
            clock.sleep(pause_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
