"""Events of a pool as a whole."""

from __future__ import annotations

from dataclasses import dataclass

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
