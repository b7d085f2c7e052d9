"""What happens to a pool and its machines, as values: for the console, for `pool.events()` and for `on_event=`.

    pool       PoolStarted, PoolReady, PoolClosed
    machine    InstanceLaunched, InstanceTerminated, NodeReady, NodeLost, NodeReplaced, LinkLost, LinkRestored
    its way up PhaseStarted, PhaseOutput, PhaseEnded, PhaseFailed
    call       TaskSent, TaskEnded, Overlooked
    from time to time  NodeUsage, CostUpdated, BudgetWarning
    reader     EventsDropped

Example:
    >>> import skyward as sky
    >>> pool = sky.ComputePool(sky.Local())
    >>> events = pool.events()
    >>> with pool:
    ...     pass
    >>> [type(event).__name__ for event in events if not isinstance(event, sky.events.NodeUsage)]
    ['PoolStarted', 'NodeReady', 'PoolReady', 'PoolClosed']
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = [
    "BudgetWarning",
    "CostUpdated",
    "DeviceUsage",
    "Emit",
    "Event",
    "EventsDropped",
    "InstanceLaunched",
    "InstanceTerminated",
    "LinkLost",
    "LinkRestored",
    "NodeLost",
    "NodeReady",
    "NodeReplaced",
    "NodeUsage",
    "Overlooked",
    "PhaseEnded",
    "PhaseFailed",
    "PhaseOutput",
    "PhaseStarted",
    "PoolClosed",
    "PoolReady",
    "PoolStarted",
    "PreemptionNotice",
    "TaskEnded",
    "TaskSent",
    "ignore",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. `at`: seconds since the epoch, by this machine's clock."""

    at: float = field(default_factory=time.time, compare=False)


# The pool ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PoolStarted(Event):
    """Its machines are being made. `provider`: the provider's name."""

    pool: str
    provider: str
    nodes: int


@dataclass(frozen=True, kw_only=True)
class PoolReady(Event):
    """Every node answers; calls can be sent. `seconds` since PoolStarted."""

    pool: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PoolClosed(Event):
    """Its machines are gone; the last event of a pool. `reason`: why, where it was not closed by its program."""

    pool: str
    seconds: float
    reason: str = ""


# Machines ------------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, kw_only=True)
class LinkLost(Event):
    """The connection to a node broke or fell silent; it is being made again, and calls go on there."""

    node: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LinkRestored(Event):
    """The connection stands again; nothing was lost. `seconds` since LinkLost."""

    node: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PreemptionNotice(Event):
    """The provider has announced that it takes a node's machine back (EC2: in two minutes). `notice`: what it said.

    Nothing new is sent to the node; what runs there goes on until the machine goes. Another machine is launched
    meanwhile, where the provider has one and the pool's limits of cost allow it, and takes its place as soon as nothing
    runs on the old one.
    """

    node: int
    notice: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeLost(Event):
    """A node is gone for good, with what it was doing. `will_be_replaced`: another one is being made."""

    node: int
    reason: str = ""
    will_be_replaced: bool = True


@dataclass(frozen=True, kw_only=True)
class NodeReplaced(Event):
    """Another machine stands in the place of a lost one. `seconds` since NodeLost."""

    node: int
    seconds: float


# Calls ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaskSent(Event):
    """A task is on its way to a node: a call, a rank of a gang, or a chunk of `calls` calls of a map.

    `task` is its number in the pool; a task that is sent again, after a loss, keeps it. `rank`: in gangs.
    """

    task: int
    name: str
    node: int
    rank: int | None = None
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class TaskEnded(Event):
    """A task that was sent has ended. `ok`: it gave its value; a call that raised, was cancelled or lost did not.

    `seconds` since TaskSent.
    """

    task: int
    name: str
    node: int
    ok: bool
    seconds: float
    rank: int | None = None
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class Overlooked(Event):
    """A pool that closes tells what its program seems to have overlooked: a failure that nobody read, and the like."""

    text: str


# From time to time ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceUsage:
    """An accelerator. `busy` is in 0..1, memory in GiB."""

    index: int
    busy: float
    memory_used_gib: float
    memory_gib: float


@dataclass(frozen=True, kw_only=True)
class NodeUsage(Event):
    """How busy a node's machine was since the last of these, everything on it included.

    `cpu` is in 0..1, of `cores`; memory in GiB. On a machine of your own that is shared, so are the figures.
    """

    node: int
    cpu: float
    cores: int
    memory_used_gib: float
    memory_gib: float
    devices: tuple[DeviceUsage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CostUpdated(Event):
    """What the pool costs per hour now, and has cost so far, in USD, by the prices of its offers."""

    price_usd_per_hour: float
    spent_usd: float


@dataclass(frozen=True, kw_only=True)
class BudgetWarning(Event):
    """The pool's budget will soon be spent; the pool is closed before it is. `seconds_left` at the present price."""

    budget_usd: float
    spent_usd: float
    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class EventsDropped(Event):
    """This reader was too slow: so many events, older than those that follow, were dropped for it."""

    count: int


Emit = Callable[[Event], None]
"""Called by any thread; returns soon and raises nothing."""


def ignore(event: Event) -> None:
    """An Emit that tells nobody."""
