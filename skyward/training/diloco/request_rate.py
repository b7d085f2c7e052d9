"""Limit on the rate of requests of each token: a program that asks in a loop must not hold up the others."""

from __future__ import annotations

REQUESTS_PER_S = 1000.0
"""Requests of one token in a second. A round is two to four requests of a worker, so this is far above any training."""
BURST = 2000
"""Requests that come at once, after a time with few, and are answered at once."""
MOST_DELAY_S = 5.0
"""Longest delay of a request. One that would have to wait longer is refused."""


class RequestRate:
    """Times at which requests may be answered. It has no clock and no threads of its own.

    Args:
        requests_per_s: Requests of one holder in a second.
        burst: Requests of one holder that may come at once.

    Example:
        >>> rate = RequestRate(requests_per_s=10, burst=2)
        >>> [rate.delay("berlin", now=100.0) for _ in range(4)]
        [0.0, 0.0, 0.1, 0.2]
        >>> rate.delay("oslo", now=100.0)
        0.0
    """

    def __init__(self, *, requests_per_s: float = REQUESTS_PER_S, burst: int = BURST) -> None:
        self._gap_s, self._burst_s = 1 / requests_per_s, (burst - 1) / requests_per_s
        self._due: dict[str | None, float] = {}
        """Time at which each holder's next request would come if they came evenly. Holders are known by their tokens,
        so there are few."""

    def delay(self, holder: str | None, *, now: float) -> float | None:
        """Return the seconds that a request has to wait; None if these are too many, and it is to be refused."""
        due = max(self._due.get(holder, now), now)
        delay = max(0.0, due - now - self._burst_s)
        if delay > MOST_DELAY_S:
            return None
        self._due[holder] = due + self._gap_s
        return round(delay, 6)
