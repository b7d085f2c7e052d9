"""Events that a pool sends at intervals, and the one for a reader that fell behind."""

from __future__ import annotations

from ..core.records import dataclass
from .base import Event


@dataclass(frozen=True, kw_only=True)
class DeviceUsage:
    """Load of one accelerator.

    Args:
        index: Index of the device on its node.
        busy: Utilization in 0..1.
        memory_used_gib: Used device memory in GiB.
        memory_gib: Total device memory in GiB.
        celsius: Temperature in degrees Celsius; 0 if the device does not tell it.

    Example:
        >>> DeviceUsage(index=0, busy=0.97, memory_used_gib=61.0, memory_gib=80.0).busy
        0.97
    """

    index: int
    busy: float
    memory_used_gib: float
    memory_gib: float
    celsius: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NodeUsage(Event):
    """Load of a node's machine since the previous NodeUsage, including everything else that runs on it.

    Emitted every two seconds while the console or another listener needs it.

    Args:
        node: Index of the node.
        cpu: Utilization of all cores in 0..1.
        cores: Number of cores.
        memory_used_gib: Used memory in GiB.
        memory_gib: Total memory in GiB.
        devices: Load of each accelerator.
        values_gib: Arguments and values of calls that the node holds in memory, in GiB.
        values_on_disk_gib: Those for which memory was short, in GiB of the node's disk.

    Example:
        >>> NodeUsage(node=0, cpu=0.5, cores=8, memory_used_gib=12.0, memory_gib=32.0).cores
        8
    """

    node: int
    cpu: float
    cores: int
    memory_used_gib: float
    memory_gib: float
    devices: tuple[DeviceUsage, ...] = ()
    values_gib: float = 0.0
    values_on_disk_gib: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CostUpdated(Event):
    """Cost of the pool, by the prices of its offers. Emitted when a machine starts or ends.

    Args:
        price_usd_per_hour: Current price of all machines together.
        spent_usd: Cost so far.

    Example:
        >>> CostUpdated(price_usd_per_hour=1.6, spent_usd=0.21).spent_usd
        0.21
    """

    price_usd_per_hour: float
    spent_usd: float


@dataclass(frozen=True, kw_only=True)
class BudgetWarning(Event):
    """80 % of the pool's budget is spent. The pool will be closed before the rest is.

    Args:
        budget_usd: The budget.
        spent_usd: Cost so far.
        seconds_left: Time until the pool is closed, at the current price.

    Example:
        >>> BudgetWarning(budget_usd=10.0, spent_usd=8.0, seconds_left=4500.0).seconds_left
        4500.0
    """

    budget_usd: float
    spent_usd: float
    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class DetachmentWarning(Event):
    """A detached pool ends soon, because it has had no client for long.

    The head sends it 10 minutes before the end, or halfway through `detached_for_s` if that is later. A client that
    comes after that gets it too. The pool does not end while a client is there, and `pool.extend` gives it more time
    without one. Only the budget of rented machines ends it all the same.

    Args:
        detached_for_s: Seconds that the pool goes on without a client.
        seconds_left: Time that was left when the head sent this, or when the client came.
        is_budget: Whether `budget_usd` ends the pool, earlier than `detached_for_s`.

    Example:
        >>> DetachmentWarning(detached_for_s=28_800.0, seconds_left=600.0).seconds_left
        600.0
    """

    detached_for_s: float
    seconds_left: float
    is_budget: bool = False


@dataclass(frozen=True, kw_only=True)
class EventsDropped(Event):
    """Gap in a reader's stream: it was too slow, so its oldest events were dropped.

    Args:
        count: Number of dropped events, all older than those that follow.

    Example:
        >>> EventsDropped(count=120).count
        120
    """

    count: int
