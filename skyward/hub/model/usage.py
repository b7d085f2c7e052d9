"""Values of usage: devices and money by project and day, and how jobs ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

DAY_MS = 86_400_000
BOUNDS_S = (60, 300, 900, 3_600, 3 * 3_600, 6 * 3_600, 12 * 3_600, 86_400, 2 * 86_400, 7 * 86_400)
"""Bounds of the histogram of durations. A job longer than the last one counts as `ENDLESS`."""
ENDLESS, NEVER = -1, 0
"""Bounds of a job beyond all others, and of one that never began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayOfUse:
    """Use of one kind of device by a project on a day.

    Attributes:
        project: Name of the project.
        day: Days since 1970, in UTC.
        kind: Accelerator; "node" for machines without any.
        seconds: Device-seconds.
        cost_usd: Cost of the machines.
        attempts: Attempts that ended on this day.
    """

    project: str
    day: int
    kind: str
    seconds: float
    cost_usd: float
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthOfUse:
    """Use of one kind of device by a project in a month, such as "2026-11"."""

    project: str
    month: str
    kind: str
    device_hours: float
    cost_usd: float
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJobs:
    """Jobs that ended alike: `bound_s` is the bound of their durations, see `BOUNDS_S`."""

    project: str
    type: str
    state: str
    bound_s: int
    jobs: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCounts:
    """Counts of jobs and devices of a whole hub.

    Attributes:
        ended: Jobs that ended since the hub has existed.
        uses: Use by project and kind of device: device-seconds since the hub has existed.
        running: (type, project) -> jobs that hold machines.
        waiting: (project, priority) -> jobs that wait.
        allocated: Kind of device -> devices that jobs hold.
        available: Kind of device -> devices that no job holds.
    """

    ended: Sequence[EndedJobs]
    uses: Mapping[tuple[str, str], float]
    running: Mapping[tuple[str, str], int]
    waiting: Mapping[tuple[str, str], int]
    allocated: Mapping[str, int]
    available: Mapping[str, int]


def bound_of(seconds: float) -> int:
    """Return the bound of the histogram that a duration counts for.

    Example:
        >>> bound_of(59.0), bound_of(61.0), bound_of(1e9)
        (60, 300, -1)
    """
    return next((bound for bound in BOUNDS_S if seconds <= bound), ENDLESS)


def parts_of_days(begins_at: int, ends_at: int) -> Iterator[tuple[int, float]]:
    """Yield each day of a time in milliseconds since 1970, with the part of the time that lies in it.

    Example:
        >>> list(parts_of_days(DAY_MS - 1000, DAY_MS + 3000))
        [(0, 0.25), (1, 0.75)]
        >>> list(parts_of_days(5, 5))
        [(0, 1.0)]
    """
    whole, at = ends_at - begins_at, begins_at
    if whole <= 0:
        yield begins_at // DAY_MS, 1.0
        return
    while at < ends_at:
        day = at // DAY_MS
        until = min((day + 1) * DAY_MS, ends_at)
        yield day, (until - at) / whole
        at = until
