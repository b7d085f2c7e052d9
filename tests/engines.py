"""The engine of an open pool from inside, for tests of properties that do not show outside."""

from __future__ import annotations

import skyward as sky
from skyward.engine.direct import DirectEngine

__all__ = ["engine_of"]


def engine_of(pool: sky.ComputePool) -> DirectEngine:
    engine, _ = pool._life.running()  # users never hold the engine, so no public name leads to it
    assert isinstance(engine, DirectEngine)
    return engine
