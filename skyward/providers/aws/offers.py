"""EC2 offers for a spec: fitting types by zone, on demand and spot, with prices."""

from __future__ import annotations

from ...accelerators import Accelerator
from ...errors import NoCapacity, UsageError
from ...values.machine import Offer, PoolSpec
from .clients import Clients
from .images import has_driver
from .network import subnet_zone
from .prices import on_demand_prices, spot_prices
from .settings import Ec2Settings
from .types import InstanceType, instance_types

_LEAST_MEMORY_GIB = 2.0
"""Default for specs that set no memory: a smaller machine cannot install anything."""
_MAX_TYPES = 60
"""Most types to offer, cheapest first: no launch tries more, and each one costs a query of its spot price."""


def offers(api: Clients, aws: Ec2Settings, spec: PoolSpec) -> list[Offer]:
    """List one offer per type, zone and kind of rent, in any order."""
    known = instance_types(api, aws)
    unknown = set(aws.instance_types) - {t.name for t in known}
    if unknown:
        raise UsageError(
            f"AWS.instance_types={sorted(unknown)!r}: not offered in {aws.region}; name types of this region, or set "
            "another region"
        )
    fitting = [t for t in known if _fits(t, spec, aws)]
    if not fitting and spec.accelerator is not None:
        _explain(spec.accelerator, known, aws.region)
    if fitting and spec.accelerator is not None and not has_driver(aws, spec.accelerator):
        raise UsageError(
            f"AWS.ami=None: no known image of system={aws.system!r} has a driver for {spec.accelerator}; name an image "
            "that has one: AWS(ami='ami-...')"
        )
    zones = _Zones(aws, subnet_zone(aws) if aws.subnet_id else None)
    prices = on_demand_prices(api, aws, [t.name for t in fitting])
    priced = [t for t in fitting if t.name in prices]
    priced.sort(key=lambda t: prices[t.name][0] + t.credits_usd_per_hour)
    del priced[_MAX_TYPES:]
    offered = [
        _offer(aws, t, zone, prices[t.name][0], prices[t.name][1], is_spot=False)
        for t in priced
        if t.has_on_demand
        for zone in zones.of(t)
    ]
    if spec.allocation != "on-demand":
        offered += _spot_offers(api, aws, priced, zones)
    return [o for o in offered if aws.max_price is None or o.price_usd_per_hour <= aws.max_price]


def _spot_offers(api: Clients, aws: Ec2Settings, types: list[InstanceType], zones: _Zones) -> list[Offer]:
    by_name = {t.name: t for t in types if t.has_spot}
    if not by_name:
        return []
    return [
        _offer(aws, by_name[name], zone, price, "EC2 spot price history, now", is_spot=True)
        for (name, zone), price in spot_prices(api, sorted(by_name)).items()
        if name in by_name and zone in zones.of(by_name[name])
    ]


def _offer(aws: Ec2Settings, kind: InstanceType, zone: str, price: float, source: str, *, is_spot: bool) -> Offer:
    if extra := kind.credits_usd_per_hour:
        source += f", and {extra:g} for the CPU credits of an hour at full load"
    return Offer(
        provider="aws",
        instance_type=kind.name,
        vcpus=kind.vcpus,
        memory_gib=kind.memory_gib,
        accelerator=kind.accelerator,
        is_spot=is_spot,
        price_usd_per_hour=price + extra,
        architecture=kind.architecture,
        region=aws.region,
        zone=zone,
        price_source=source,
    )


class _Zones:
    """Zones that a type may use: offered there, allowed by the options, and with the named subnet in them."""

    def __init__(self, aws: Ec2Settings, of_subnet: str | None) -> None:
        self._aws = aws
        self._of_subnet = of_subnet
        if of_subnet is not None and aws.zones and of_subnet not in aws.zones:
            raise UsageError(
                f"AWS.subnet_id={aws.subnet_id!r}: in {of_subnet}, which is not in zones={list(aws.zones)}; "
                "name a subnet of these zones, or leave zones out"
            )

    def of(self, kind: InstanceType) -> list[str]:
        if self._of_subnet is not None:
            return [z for z in kind.zones if z == self._of_subnet]
        # Local and wavelength zones have longer names. They need an opt-in and networks of their own.
        aws = self._aws
        return [z for z in kind.zones if (z in aws.zones if aws.zones else len(z) == len(aws.region) + 1)]


def _fits(kind: InstanceType, spec: PoolSpec, aws: Ec2Settings) -> bool:
    if aws.instance_types and kind.name not in aws.instance_types:
        return False
    if aws.exclude_burstable and kind.is_burstable:
        return False
    return (
        kind.vcpus >= (spec.vcpus or 1)
        and kind.memory_gib >= (spec.memory_gib or (0.0 if aws.instance_types else _LEAST_MEMORY_GIB))
        and kind.architecture == (spec.architecture or _usual(kind, spec, aws))
        and _has(kind, spec.accelerator, is_named=kind.name in aws.instance_types)
    )


def _usual(kind: InstanceType, spec: PoolSpec, aws: Ec2Settings) -> str:
    """Return the default architecture: x86_64, which most wheels support, unless types or a device were requested."""
    return kind.architecture if aws.instance_types or spec.accelerator is not None else "x86_64"


def _has(kind: InstanceType, wanted: Accelerator | None, *, is_named: bool) -> bool:
    if wanted is None:
        return kind.accelerator is None or is_named  # never pay for a GPU that nobody requested
    has = kind.accelerator
    return (
        has is not None
        and has.name == wanted.name.removesuffix("-SXM")  # EC2's A100 and H100 are the SXM form
        and has.count == wanted.count
        and wanted.memory in ("", has.memory)
    )


def _explain(wanted: Accelerator, known: list[InstanceType], region: str) -> None:
    """Raise NoCapacity that lists the available counts and sizes of the device, if there are any."""
    name = wanted.name.removesuffix("-SXM")
    available = sorted({f"{t.accelerator} ({t.name})" for t in known if t.accelerator and t.accelerator.name == name})
    if available:
        raise NoCapacity(
            f"aws: no machine in {region} has exactly {wanted}; request one of these: {', '.join(available)}",
            field="accelerator",
            value=wanted,
        )
