"""What happens to a pool and its machines, as values: for the console, for `pool.events()` and for `on_event=`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = [
    "Emit",
    "Event",
    "InstanceLaunched",
    "InstanceTerminated",
    "NodeReady",
    "PhaseEnded",
    "PhaseFailed",
    "PhaseOutput",
    "PhaseStarted",
    "ignore",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. `at`: seconds since the epoch, by this machine's clock."""

    at: float = field(default_factory=time.time, compare=False)


@dataclass(frozen=True, kw_only=True)
class PhaseStarted(Event):
    """A node begins a part of its way up: "boot", "connect", "python", "packages", ..."""

    node: int
    phase: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class PhaseOutput(Event):
    """A line that a phase printed."""

    node: int
    phase: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PhaseEnded(Event):
    """`was_ready`: there was nothing to do, it was there already."""

    node: int
    phase: str
    seconds: float
    was_ready: bool = False


@dataclass(frozen=True, kw_only=True)
class PhaseFailed(Event):
    node: int
    phase: str
    seconds: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeReady(Event):
    """The node's agent answers."""

    node: int
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class InstanceLaunched(Event):
    """A provider has made a machine; from now on it may cost money. `instance`: the provider's id of it."""

    node: int
    instance: str
    instance_type: str
    price_usd_per_hour: float
    is_spot: bool


@dataclass(frozen=True, kw_only=True)
class InstanceTerminated(Event):
    """The provider says that it is gone."""

    node: int
    instance: str


Emit = Callable[[Event], None]
"""Called by any thread; returns soon and raises nothing."""


def ignore(event: Event) -> None:
    """An Emit that tells nobody."""
