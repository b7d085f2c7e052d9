"""The engine of an open pool from inside, for tests of properties that do not show outside."""

from __future__ import annotations

from typing import Any

import skyward as sky
from skyward.engine.direct import DirectEngine
from skyward.values.ref import held_by

__all__ = ["engine_of", "hosted_pool", "is_moving"]


def engine_of(pool: sky.ComputePool) -> DirectEngine:
    engine, _ = pool._life.running()  # users never hold the engine, so no public name leads to it
    assert isinstance(engine, DirectEngine)
    return engine


def hosted_pool(provider: Any = None, *, lease_s: float = 5.0, **options: Any) -> sky.ComputePool:
    """Return a pool whose scheduler runs in a head: beside its first node; by default all are on this machine."""
    pool = sky.ComputePool(provider or sky.Local(lease_s=lease_s), **options)
    pool._life.is_hosted = True  # users have no option for it yet
    return pool


def is_moving(pool: sky.ComputePool, ref: sky.Ref[Any]) -> bool:
    """Return whether a second node was told to keep a value."""
    (blob,) = held_by(ref).pickled.buffers
    return sum(blob in link.held for link in engine_of(pool).ledger.links.values()) == 2
