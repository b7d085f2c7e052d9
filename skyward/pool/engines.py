"""Engines of pools: what carries the calls, which pools may have which, and what the option `engine` stands for."""

from __future__ import annotations

import enum
from typing import Final, Literal

from ..errors import ProviderError, UsageError
from ..providers.base import Provider, may_have_head
from ..values.machine import PoolSpec

EngineName = Literal["auto", "direct", "ray"]

RAY_AFTER_S: Final = 10.0
"""Seconds until a pool that does not need Ray raises it. Nodes then install 280 MB and start it, which takes their
network and cores from the first calls, and is of no use to a short pool."""


class Way(enum.Enum):
    """Place of a pool's scheduler, and what its links to the nodes go by."""

    DIRECT = enum.auto()
    """The scheduler and the links are this program's."""
    LENT = enum.auto()
    """The scheduler is in a head, to which this program lends its channels. Users have no option for it."""
    RAY_OR_LENT = enum.auto()
    """Ray joins the nodes of a head. Without Ray the channels stay lent."""
    RAY = enum.auto()
    """As RAY_OR_LENT, but the pool ends if Ray does not come up."""


def choose_way(engine: EngineName, *, provider: Provider, spec: PoolSpec, is_detached: bool) -> Way:
    """Return what an engine stands for in a pool of these options. Raises UsageError: it cannot have that engine.

    "auto" is Ray for each pool that can have it, by the greatest number of its nodes. A detached pool needs it, because
    nobody lends it channels.

    Args:
        engine: The option.
        provider: Source of the machines.
        spec: Request of the pool.
        is_detached: Whether it goes on without its client.
    """

    def refuse(problem: str) -> UsageError:
        return UsageError(f"engine={engine!r}: {problem}", field="engine", value=engine)

    if engine == "direct":
        if is_detached:
            raise refuse("a detached pool has its scheduler on its node; omit engine, or detached_for_s")
        return Way.DIRECT
    problem = _why_without_ray(provider, spec)
    if engine == "ray":
        if problem:
            raise refuse(problem)
        return Way.RAY
    if problem:
        return Way.DIRECT
    return Way.RAY if is_detached else Way.RAY_OR_LENT


def _why_without_ray(provider: Provider, spec: PoolSpec) -> str:
    """Return why a pool cannot have Ray, and what to do; empty: it can."""
    if not may_have_head(provider):
        known = "sky.SSH(hosts=[...]) and sky.AWS()"
        return f"not supported with {provider.name}, so far only with {known}; use one of them, or omit it"
    if spec.most_nodes == 1:
        return "joins several nodes, and this pool has one; set nodes=2 or more, or omit engine"
    return ""


def did_not_come_up(reason: str, *, is_cut: bool = False, is_detached: bool = False) -> UsageError | ProviderError:
    """Return the error of a pool that needs Ray and does not get it. `is_cut`: its nodes do not reach each other."""
    advice = "omit detached_for_s" if is_detached else 'set engine="auto"'
    text = f"engine='ray': Ray did not come up; {advice} to do without it, or remove the cause: {reason}"
    return UsageError(text, field="engine", value="ray") if is_cut else ProviderError(text)
