"""Requests and answers about pools. Times are milliseconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


class PoolsQuery(Struct):
    """Part of the pools of a project, the newest first."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100
    page_token: str | None = None
    project: str | None = None


class PoolOut(Struct):
    """A pool of machines. `state` is "starting", "open", "closed", or "lost" if its program has fallen silent."""

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


class PoolsOut(Struct):
    pools: list[PoolOut]
    next_page_token: str | None = None


class PoolNodeOut(Struct):
    """A node. `state` is "starting", "ready", "lost" or "ended"."""

    node: int
    state: str
    address: str
    ready_at: int | None
    losses: int


class PoolMachineOut(Struct):
    """A machine that was launched for a node."""

    node: int
    instance: str
    instance_type: str
    price_usd_per_hour: float
    is_spot: bool
    launched_at: int
    ended_at: int | None


class PoolCallOut(Struct):
    """A task on a node: one call, one rank of a gang, or one chunk of a map. `ok` is null while it runs."""

    task: int
    name: str
    node: int
    rank: int | None
    calls: int
    started_at: int
    ended_at: int | None
    ok: bool | None


class PoolEventOut(Struct):
    """An event, such as `node.lost`, with its fields."""

    number: int
    at: int
    kind: str
    node: int | None
    detail: dict[str, Any]


class PoolHistoryOut(Struct):
    """A pool with its first 5,000 events and its last 5,000 calls."""

    pool: PoolOut
    nodes: list[PoolNodeOut]
    machines: list[PoolMachineOut]
    calls: list[PoolCallOut]
    events: list[PoolEventOut]
