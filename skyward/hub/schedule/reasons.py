"""Reasons for waiting, as sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Machines or limit that jobs of one shape wait for. Jobs that wait for the same thing share it.

    Args:
        need: The need, in words.
        free: Devices that are free now on machines that suit; -1 if no machines suit.
        limit: Limit of a project or user that stands against it; empty if none does.
        quota: Use of the project's own devices, in words; empty without a quota.
        full_until: Time until which every provider that suits is full; 0 if one is not.
        is_drained: Every set that suits begins no jobs.
        is_foreign: No set that suits is the project's to use.
    """

    need: str
    free: int = -1
    limit: str = ""
    quota: str = ""
    full_until: float = 0.0
    is_drained: bool = False
    is_foreign: bool = False


class WaitReason(NamedTuple):
    """Cause for which a job waits.

    Args:
        obstacle: Machines or limit that it waits for.
        ahead: Jobs that are ahead of it and wait for the same machines.
        not_before: Time at which its machines are free at the latest, if that is known.
        victims: Jobs that save and end in its favour.
    """

    obstacle: Obstacle
    ahead: int = 0
    not_before: float = math.inf
    victims: int = 0

    def sentence(self, zone: tzinfo = UTC) -> str:
        """Return the reason in words.

        Example:
            >>> obstacle = Obstacle("8 A100 on 2 nodes", free=5, quota="project nlp uses 58 of 64 A100")
            >>> WaitReason(obstacle, not_before=51_600.0).sentence()
            'waits for 8 A100 on 2 nodes: 5 free; not before 14:20; project nlp uses 58 of 64 A100'
        """
        obstacle = self.obstacle
        if obstacle.free < 0 and not self.victims:
            whose = "that its project may use" if obstacle.is_foreign else "of this hub"
            return f"waits for {obstacle.need}: no machines {whose} can run it"
        parts = [f"waits for {obstacle.need}: {self._state(zone)}"]
        if self.ahead:
            parts.append(f"{self.ahead} job{'s are' if self.ahead > 1 else ' is'} ahead of it")
        if self.not_before < math.inf:
            parts.append(f"not before {_clock(self.not_before, zone)}")
        if obstacle.quota and not obstacle.limit:
            parts.append(obstacle.quota)
        return "; ".join(parts)

    def _state(self, zone: tzinfo) -> str:
        obstacle = self.obstacle
        if self.victims:
            return f"{self.victims} jobs save and end for it" if self.victims > 1 else "1 job saves and ends for it"
        if obstacle.limit:
            return obstacle.limit
        if obstacle.is_drained:
            return "the machines begin no jobs, because they are drained"
        if obstacle.full_until:
            return f"the provider or its launcher has none until {_clock(obstacle.full_until, zone)}"
        return f"{obstacle.free} free"


def _clock(at: float, zone: tzinfo) -> str:
    return datetime.fromtimestamp(at, zone).strftime("%H:%M")
