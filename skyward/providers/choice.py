"""Choice and order of the offers that a pool tries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from ..accelerators import Accelerator
from ..errors import NoCapacity
from ..values.allocation import AllocationStrategy
from ..values.machine import Offer, PoolSpec

Selection = Literal["cheapest", "first", "fastest"]
SELECTIONS: tuple[Selection, ...] = get_args(Selection)


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
    requested = requested_of(spec)
    field, value = next(iter(requested.items()), ("", None))
    listed = ", ".join(f"{field}={value}" for field, value in requested.items())
    kinds = "only on-demand" if offers and spec.allocation == "spot" else "no"
    return NoCapacity(
        f"{name}: {kinds} machine type here has {listed or 'the requested properties'} "
        f"(allocation={spec.allocation!r}); lower the request, or try another region",
        field=field,
        value=value,
    )


def requested_of(spec: PoolSpec) -> dict[str, object]:
    """Return what a request asks of each machine, by option; what is rarest first."""
    options = ("accelerator", "memory_gib", "vcpus", "architecture")
    return {option: value for option in options if (value := getattr(spec, option)) is not None}


# Dense 16-bit matrix TFLOPS of one device, in its fastest form. Data sheets often print the number with sparsity, which
# is twice as much.
_NVIDIA_TFLOPS = {  # Source, unless noted: https://www.nvidia.com/en-us/data-center/, data sheets.
    "T4": 65,
    "T4G": 65,  # the chip of the T4
    "V100": 125,
    "A2": 18,
    "A10": 125,
    "A10G": 70,  # source: https://aws.amazon.com/ec2/instance-types/g5/
    "A16": 18,
    "A30": 165,
    "A40": 150,
    "A100": 312,
    "A800": 312,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "H20": 148,
    "H100": 989,
    "H800": 989,
    "H200": 989,
    "GH200": 989,
    "B100": 1750,
    "B200": 2250,
    "GB200": 2500,
    "B300": 2250,
    "GB300": 2500,
    "RTX 3090": 71,
    "RTX 4090": 165,
}
_AMD_TFLOPS = {  # Source: https://www.amd.com/en/products/accelerators/instinct.html, data sheets.
    "MI100": 185,
    "MI210": 181,
    "MI250": 362,
    "MI250X": 383,
    "MI300A": 981,
    "MI300X": 1307,
    "MI325X": 1307,
    "MI350X": 2307,
    "MI355X": 2517,
}
_AWS_TFLOPS = {  # Source: https://awsdocs-neuron.readthedocs-hosted.com, pages of the chips.
    "Inferentia2": 190,
    "Trainium1": 190,
    "Trainium2": 667,
}
_GOOGLE_TFLOPS = {  # Source: https://cloud.google.com/tpu/docs, pages of the versions.
    "TPUv2": 46,
    "TPUv3": 123,
    "TPUv4": 275,
    "TPUv5e": 197,
    "TPUv5p": 459,
    "TPUv6": 918,
}
_TFLOPS: dict[str, float] = {**_NVIDIA_TFLOPS, **_AMD_TFLOPS, **_AWS_TFLOPS, **_GOOGLE_TFLOPS}


def speed_of(offer: Offer, wanted: Accelerator | None = None) -> tuple[float, float]:
    """Return the speed of a machine, to compare it with others: TFLOPS of its accelerators, and its virtual CPUs.

    An accelerator that is not in the table counts as slower than any that is.

    Args:
        offer: The machine.
        wanted: Accelerator that was requested, for an offer that does not know its own.
    """
    accelerator = offer.accelerator or wanted
    if accelerator is None:
        return 0.0, offer.vcpus
    product = accelerator.name.split("-")[0].replace("_", " ")
    return _TFLOPS.get(product, 1e-3) * accelerator.count, offer.vcpus
