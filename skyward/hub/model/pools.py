"""Pools of machines as the hub shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord:
    """A pool. Times are milliseconds since 1970.

    Attributes:
        state: "starting", "open", "closed", or "lost" if its program has fallen silent.
        heard_at: last sign of life of its program.
        reason: why it ended; empty if its program closed it.
        price_usd_per_hour: current price of all its machines.
        spent_usd: cost so far, also since the last event.
        calls: calls that ended.
        lost_nodes: nodes that were lost.
        replaced_nodes: lost nodes that got another machine.
    """

    id: str
    name: str
    provider: str
    user: str
    state: str
    nodes: int
    started_at: int
    ready_at: int | None
    ended_at: int | None
    heard_at: int
    reason: str
    price_usd_per_hour: float
    spent_usd: float
    calls: int
    failed: int
    lost_nodes: int
    replaced_nodes: int


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """Event of a pool, such as `node.lost`, with its fields."""

    number: int
    at: int
    kind: str
    node: int | None
    detail: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class PoolMachine:
    """A machine that a pool launched, and the node that it was for."""

    node: int
    instance: str
    instance_type: str
    price_usd_per_hour: float
    is_spot: bool
    launched_at: int
    ended_at: int | None = None


@dataclass(slots=True, kw_only=True)
class PoolNode:
    """A node. `state` is "starting", "ready", "lost", or "ended" with its pool."""

    node: int
    state: str = "starting"
    address: str = ""
    ready_at: int | None = None
    losses: int = 0


@dataclass(slots=True, kw_only=True)
class PoolCall:
    """A task on a node, for the timeline: one call, one rank, or one chunk of a map. `ok` is None while it runs."""

    task: int
    name: str
    node: int
    rank: int | None
    calls: int
    started_at: int
    ended_at: int | None = None
    ok: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHistory:
    """A pool with everything that happened to it."""

    pool: PoolRecord
    nodes: Sequence[PoolNode] = field(default_factory=list)
    machines: Sequence[PoolMachine] = field(default_factory=list)
    calls: Sequence[PoolCall] = field(default_factory=list)
    events: Sequence[PoolEvent] = field(default_factory=list)
