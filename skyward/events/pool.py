"""Events of a pool as a whole."""

from __future__ import annotations

from ..core.records import dataclass
from .base import Event


@dataclass(frozen=True, kw_only=True)
class PoolStarted(Event):
    """Start of a pool: its machines are being created.

    Args:
        pool: Unique name of the pool.
        provider: Name of the provider.
        nodes: Number of nodes.

    Example:
        >>> PoolStarted(pool="train-1a2b3c4d", provider="aws", nodes=4).nodes
        4
    """

    pool: str
    provider: str
    nodes: int


@dataclass(frozen=True, kw_only=True)
class PoolReady(Event):
    """Every node answers, and calls can be sent.

    Args:
        pool: Unique name of the pool.
        seconds: Time since PoolStarted.

    Example:
        >>> PoolReady(pool="train-1a2b3c4d", seconds=41.5).seconds
        41.5
    """

    pool: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PoolClosed(Event):
    """End of a pool: its machines are gone. Always the last event.

    Args:
        pool: Unique name of the pool.
        seconds: Time since PoolStarted.
        reason: Why the pool ended; empty if its program closed it.

    Example:
        >>> PoolClosed(pool="train-1a2b3c4d", seconds=90.0).reason
        ''
    """

    pool: str
    seconds: float
    reason: str = ""
    calls: int = 0
    failed: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineUp(Event):
    """An engine carries the calls between the nodes of a pool, which were carried by the client until now.

    Args:
        engine: Name of the engine.
        seconds: Time since its start.

    Example:
        >>> EngineUp(engine="ray", seconds=11.5).engine
        'ray'
    """

    engine: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineLost(Event):
    """An engine between the nodes of a pool is gone, or did not come up. No call is lost: the client carries them.

    Args:
        engine: Name of the engine.
        reason: Why, in words.

    Example:
        >>> EngineLost(engine="ray", reason="Ray on the head's machine has ended").engine
        'ray'
    """

    engine: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PoolScaled(Event):
    """A pool begins to grow, or has given nodes back.

    Args:
        pool: Unique name of the pool.
        before: Number of nodes before.
        nodes: Number of nodes afterwards; 0 for a pool that rests.
        reason: Why, in words.
        removed: Nodes that were given back.

    Example:
        >>> PoolScaled(pool="train-1a2b3c4d", before=2, nodes=6, reason="14 calls wait").nodes
        6
    """

    pool: str
    before: int
    nodes: int
    reason: str = ""
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScalingFailed(Event):
    """A pool got no further nodes. It remembers that for two minutes, and continues with those that are there.

    Args:
        pool: Unique name of the pool.
        nodes: Number of nodes that are there.
        wanted: Number of nodes that were wanted.
        reason: Why there are no more.

    Example:
        >>> ScalingFailed(pool="train-1a2b3c4d", nodes=2, wanted=6, reason="no capacity").wanted
        6
    """

    pool: str
    nodes: int
    wanted: int
    reason: str
