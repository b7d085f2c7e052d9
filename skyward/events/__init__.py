"""Events of a pool and its machines, for the console, `pool.events()` and `on_event=`.

    pool       PoolStarted, PoolReady, PoolScaled, ScalingFailed, EngineUp, EngineLost, PoolClosed
    machine    InstanceLaunched, InstanceTerminated, NodeReady, NodeLost, NodeReplaced,
               LinkLost, LinkRestored, PreemptionNotice, ValueRerouted
    bootstrap  PhaseStarted, PhaseOutput, PhaseEnded, PhaseFailed
    call       TaskSent, TaskEnded, Overlooked
    periodic   NodeUsage, CostUpdated, BudgetWarning, DetachmentWarning
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

from .base import Emit, Event, ignore
from .call import Overlooked, TaskEnded, TaskSent
from .machine import (
    InstanceLaunched,
    InstanceTerminated,
    LinkLost,
    LinkRestored,
    NodeLost,
    NodeReady,
    NodeReplaced,
    PhaseEnded,
    PhaseFailed,
    PhaseOutput,
    PhaseStarted,
    PreemptionNotice,
    ValueRerouted,
)
from .periodic import BudgetWarning, CostUpdated, DetachmentWarning, DeviceUsage, EventsDropped, NodeUsage
from .pool import EngineLost, EngineUp, PoolClosed, PoolReady, PoolScaled, PoolStarted, ScalingFailed

__all__ = [
    "BudgetWarning",
    "CostUpdated",
    "DetachmentWarning",
    "DeviceUsage",
    "Emit",
    "EngineLost",
    "EngineUp",
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
    "PoolScaled",
    "PoolStarted",
    "PreemptionNotice",
    "ScalingFailed",
    "TaskEnded",
    "TaskSent",
    "ValueRerouted",
    "ignore",
]

# Pickles, reprs and docs name the public module, so that classes can move between the files of this package.
for _name in __all__:
    if _name != "Emit":  # a generic alias, whose module cannot be set
        globals()[_name].__module__ = __name__
