"""Time as something that can be given: real, or a test's own. And patience: calls made again until a limit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from ..errors import ProviderError

__all__ = ["SYSTEM_CLOCK", "Clock", "patiently"]

T = TypeVar("T")

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 20.0


class Clock(Protocol):
    """What provisioning knows of time."""

    def monotonic(self) -> float:
        """Seconds since some moment; never set, never backwards."""
        ...

    def time(self) -> float:
        """Seconds since the epoch, as this machine believes."""
        ...

    def sleep(self, seconds: float, /) -> None: ...


SYSTEM_CLOCK: Clock = time
"""The real one."""


def patiently(
    call: Callable[[], T],
    *,
    again_on: type[ProviderError] | tuple[type[ProviderError], ...],
    clock: Clock,
    limit_s: float,
    jitter: Callable[[], float] = random.random,
) -> T:
    """What `call` returns, made again while it raises `again_on`; after `limit_s` seconds that error is raised.

    Waits grow from half a second to 20, each anywhere between half of it and all of it (`jitter()` in [0, 1)): many
    clients that were told to wait at once must not come back at once.
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
