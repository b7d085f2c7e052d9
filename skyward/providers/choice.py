"""Which offers a pool takes, and in which order."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import NoCapacity
from ..values.allocation import AllocationStrategy
from ..values.machine import Offer, PoolSpec

__all__ = ["in_order", "nothing_fits", "too_expensive"]


def in_order(offers: Iterable[Offer], allocation: AllocationStrategy) -> list[Offer]:
    """Those that the strategy allows, as they are to be tried; see AllocationStrategy."""
    cheapest = sorted(offers, key=lambda o: (o.price_usd_per_hour, o.vcpus, o.instance_type, o.zone))
    spot = [o for o in cheapest if o.is_spot]
    on_demand = [o for o in cheapest if not o.is_spot]
    if allocation == "spot":
        return spot
    if allocation == "on-demand":
        return on_demand
    if allocation == "cheapest":
        return cheapest
    return [*spot, *on_demand]


def too_expensive(offer: Offer, nodes: int, max_hourly_cost: float | None) -> bool:
    """Whether so many of it cost more than the limit, which is in USD per hour for all together."""
    # The tolerance is for sums of prices that are no binary fractions.
    return max_hourly_cost is not None and offer.price_usd_per_hour * nodes > max_hourly_cost + 1e-9


def nothing_fits(name: str, spec: PoolSpec, offers: list[Offer]) -> NoCapacity:
    """The error that says what was asked for."""
    asked = [
        f"{field}={value}"
        for field, value in (
            ("accelerator", spec.accelerator),
            ("vcpus", spec.vcpus),
            ("memory_gib", spec.memory_gib),
            ("architecture", spec.architecture),
        )
        if value is not None
    ]
    kinds = "only on-demand" if offers and spec.allocation == "spot" else "no"
    return NoCapacity(
        f"{name}: {kinds} machine type here has {', '.join(asked) or 'what was asked for'} "
        f"(allocation={spec.allocation!r}); ask for less, or in another region"
    )
