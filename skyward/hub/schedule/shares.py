"""Shares of projects: who has had least of what there is, and takes the next turn.

The share of a project is the largest part that it holds of any kind of device (dominant share), plus the part that it
held lately, divided by its weight. Past use decays by half in a half-life, so a project that was idle for a year gains
no more than one that was idle for a month, and nobody gains by handing in jobs in bursts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .values import ProjectState


def decayed(used: Mapping[str, float], elapsed_s: float, half_life_s: float) -> dict[str, float]:
    """Return what earlier use counts after `elapsed_s` more seconds.

    Example:
        >>> decayed({"A100": 800.0}, elapsed_s=3600.0, half_life_s=3600.0)
        {'A100': 400.0}
    """
    factor = 0.5 ** (elapsed_s / half_life_s)
    return {kind: seconds * factor for kind, seconds in used.items()}


def charged(
    used: Mapping[str, float], kind: str, devices: int, elapsed_s: float, half_life_s: float
) -> dict[str, float]:
    """Return the use after `devices` were held for `elapsed_s` seconds, up to now.

    Each second that was held decays by itself, so the result does not depend on how often it is computed.

    Example:
        >>> once = charged({}, "A100", devices=8, elapsed_s=7200.0, half_life_s=3600.0)
        >>> half = charged({}, "A100", devices=8, elapsed_s=3600.0, half_life_s=3600.0)
        >>> twice = charged(half, "A100", devices=8, elapsed_s=3600.0, half_life_s=3600.0)
        >>> math.isclose(once["A100"], twice["A100"])
        True
    """
    life_s = half_life_s / math.log(2)
    after = decayed(used, elapsed_s, half_life_s)
    after[kind] = after.get(kind, 0.0) + devices * life_s * (1 - math.exp(-elapsed_s / life_s))
    return after


class ProjectShare:
    """Share of one project, kept current while jobs are placed.

    Args:
        project: The project with its decayed use.
        capacity: Kind of device -> devices that there are.
        half_life_s: Half-life of past use.

    Attributes:
        value: The share: 0 for a project that held nothing.
    """

    def __init__(self, project: ProjectState, capacity: Mapping[str, int], half_life_s: float) -> None:
        self._weight, self._capacity = project.weight, capacity
        life_s = half_life_s / math.log(2)
        # Device-seconds over the mean life of a second: the devices that a project held lately, on average.
        self._held = {kind: seconds / life_s for kind, seconds in project.used.items()}
        self._dominant = max(map(self._part, self._held), default=0.0)
        self.value = self._dominant / self._weight

    def add(self, kind: str, devices: int) -> None:
        """Count devices that the project holds now."""
        self._held[kind] = self._held.get(kind, 0.0) + devices
        self._dominant = max(self._dominant, self._part(kind))
        self.value = self._dominant / self._weight

    def _part(self, kind: str) -> float:
        capacity = self._capacity.get(kind, 0)
        return self._held[kind] / capacity if capacity else 0.0
