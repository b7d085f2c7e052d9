"""Choice and order of the offers that a pool tries."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import NoCapacity
from ..values.allocation import AllocationStrategy
from ..values.machine import Offer, PoolSpec


def in_order(offers: Iterable[Offer], allocation: AllocationStrategy) -> list[Offer]:
    """Return the offers that the strategy allows, in the order to try them; see AllocationStrategy."""
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
    """Return whether `nodes` machines of this offer exceed the limit, in USD per hour for all of them together."""
    # The tolerance absorbs rounding errors: sums of decimal prices are not exact in binary.
    return max_hourly_cost is not None and offer.price_usd_per_hour * nodes > max_hourly_cost + 1e-9


def nothing_fits(name: str, spec: PoolSpec, offers: list[Offer]) -> NoCapacity:
    """Build the error that lists the requested machine properties."""
    requested = [
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
        f"{name}: {kinds} machine type here has {', '.join(requested) or 'the requested properties'} "
        f"(allocation={spec.allocation!r}); lower the request, or try another region"
    )
