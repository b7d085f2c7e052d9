"""Engines of pools: what carries the calls, which pools may have which, and what the option `engine` stands for."""

from __future__ import annotations

import enum
from typing import Literal

from ..errors import ProviderError, UsageError
from ..providers.base import Provider, as_detachable
from ..values.machine import PoolSpec

EngineName = Literal["auto", "direct", "ray"]


class Way(enum.Enum):
    """Place of a pool's scheduler, and what its links to the nodes go by."""

    DIRECT = enum.auto()
    """The scheduler and the links are this program's."""
    LENT = enum.auto()
    """The scheduler is in a head, to which this program lends its channels. Users have no option for it."""
    RAY_OR_LENT = enum.auto()
    """Ray joins the nodes of a head. Without Ray the channels stay lent. *Planned* for "auto"."""
    RAY = enum.auto()
    """As RAY_OR_LENT, but the pool ends if Ray does not come up."""


def way_of(engine: EngineName) -> Way:
    """Return what an engine that was checked stands for.

    "auto" is direct so far: a direct pool replaces a lost first node, which ends a pool with a head.
    """
    return Way.RAY if engine == "ray" else Way.DIRECT


def check_engine(
    engine: EngineName, *, provider: Provider, spec: PoolSpec, is_fixed: bool, rests: bool, is_detached: bool
) -> None:
    """Raise UsageError unless a pool of these options can have the engine."""

    def refuse(problem: str) -> UsageError:
        return UsageError(f"engine={engine!r}: {problem}", field="engine", value=engine)

    if engine == "direct" and is_detached:
        raise refuse("a detached pool has its scheduler on its node; omit engine, or detached_for_s")
    if engine != "ray":
        return
    if as_detachable(provider) is None or provider.is_rented:  # only there was Ray tried
        raise refuse(f"not supported with {provider.name}, so far only with sky.SSH(hosts=[...]); use that, or omit it")
    if not is_fixed:
        raise refuse("needs a fixed number of nodes so far; set nodes=4, for example, or omit engine")
    if spec.nodes == 1:
        raise refuse("joins several nodes, and this pool has one; set nodes=2 or more, or omit engine")
    if rests:
        raise refuse("a pool on Ray cannot rest so far; omit idle_timeout_s, or engine")
    if spec.image.container:
        raise refuse("not supported with Image.container so far; use pip= in the image instead, or omit engine")


def did_not_come_up(reason: str) -> ProviderError:
    """Return the error of a pool that needs Ray and does not get it."""
    return ProviderError(
        f"engine='ray': Ray did not come up; set engine=\"auto\" to do without it, or remove the cause: {reason}"
    )
