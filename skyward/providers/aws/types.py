"""Instance types of a region and their zones, as EC2 describes them; cached on disk for a day."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ...accelerators import Accelerator
from ...core.records import dataclass
from ...errors import UsageError
from .cached import cached
from .clients import Clients, clients
from .failures import translated
from .settings import Ec2Settings

_MAX_AGE_S = 86400.0
# EC2's names of devices that `sky.accelerators` lists under other names.
_NAMES = {"RTX PRO Server 6000": "RTX PRO 6000", "Inferentia": "Inferentia1", "Trainium": "Trainium1"}
_DEVICES = (
    ("GpuInfo", "Gpus"),
    ("NeuronInfo", "NeuronDevices"),
    ("InferenceAcceleratorInfo", "Accelerators"),
)
_BURSTABLE = ("t1.", "t2.", "t3.", "t3a.", "t4g.")
# Unless an account says otherwise these are "unlimited": they never slow down. CPU use above the size's baseline is
# billed by the vCPU-hour, in all regions, and for spot too.
# Source: EC2 user guide, "Unlimited mode for burstable performance instances"; EC2 pricing, "T2/T3/T4g Unlimited Mode".
_CREDITS_USD = {"t3": 0.05, "t3a": 0.05, "t4g": 0.04}
_BASELINE = {"nano": 0.05, "micro": 0.1, "small": 0.2, "medium": 0.2, "large": 0.3, "xlarge": 0.4, "2xlarge": 0.4}


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """Properties of an instance type, and the zones of the region that offer it."""

    name: str
    vcpus: int
    memory_gib: float
    architecture: Literal["x86_64", "arm64"]
    accelerator: Accelerator | None
    has_spot: bool
    has_on_demand: bool
    has_efa: bool
    zones: tuple[str, ...]

    @property
    def is_burstable(self) -> bool:
        return self.name.startswith(_BURSTABLE)

    @property
    def credits_usd_per_hour(self) -> float:
        """Price of the CPU credits on top of the type's own price while all its CPUs are busy."""
        family, _, size = self.name.partition(".")
        share = 1.0 - _BASELINE.get(size, 0.4)
        return round(_CREDITS_USD.get(family, 0.0) * self.vcpus * share, 6)


def instance_types(api: Clients, aws: Ec2Settings) -> list[InstanceType]:
    """List all bootable types of the region: no bare metal, no Macs, none with an unreadable description."""
    key = f"types-2-{aws.region}" + ("-test" if aws.endpoint_url else "")
    facts: dict[str, Any] = cached(key, _MAX_AGE_S, lambda: _fetched(api)).value
    return [made for name in facts if (made := _made(name, facts[name])) is not None]


def has_efa(aws: Ec2Settings, name: str) -> bool:
    """Return whether the type has an Elastic Fabric Adapter."""
    api = clients(aws.region, aws.profile, aws.endpoint_url)
    types = [t for t in instance_types(api, aws) if t.name == name]
    if not types:
        raise UsageError(f"AWS.instance_types={name!r}: not offered in {aws.region}; name a type of this region")
    return types[0].has_efa


def _fetched(api: Clients) -> dict[str, Any]:
    zones: dict[str, list[str]] = {}
    with translated("DescribeInstanceTypeOfferings"):
        pages = api.ec2.get_paginator("describe_instance_type_offerings").paginate(LocationType="availability-zone")
        for page in pages:
            for offering in page["InstanceTypeOfferings"]:
                zones.setdefault(offering["InstanceType"], []).append(offering["Location"])
    facts: dict[str, Any] = {}
    with translated("DescribeInstanceTypes"):
        for answer in api.ec2.get_paginator("describe_instance_types").paginate():
            for kind in answer["InstanceTypes"]:
                # Our images are HVM: requesting one on a type without HVM would fail the launch.
                can_boot = not kind.get("BareMetal") and "hvm" in kind.get("SupportedVirtualizationTypes", ["hvm"])
                if kind["InstanceType"] in zones and can_boot:
                    facts[kind["InstanceType"]] = {
                        **_kept(kind),
                        "zones": sorted(zones[kind["InstanceType"]]),
                    }
    return facts


def _kept(kind: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the used fields of a 4 KB description."""
    return {
        "vcpus": kind["VCpuInfo"]["DefaultVCpus"],
        "memory_mib": kind["MemoryInfo"]["SizeInMiB"],
        "architectures": kind["ProcessorInfo"].get("SupportedArchitectures", []),
        "has_spot": "spot" in kind.get("SupportedUsageClasses", []),
        "has_on_demand": "on-demand" in kind.get("SupportedUsageClasses", ["on-demand"]),  # else: capacity blocks only
        "has_efa": bool(kind.get("NetworkInfo", {}).get("EfaSupported")),
        "devices": [_device(device) for info, devices in _DEVICES for device in kind.get(info, {}).get(devices, [])],
    }


def _device(device: Mapping[str, Any]) -> tuple[str, int, int]:
    # A machine with a fraction of a GPU reports 0 devices and one logical device.
    count = device.get("Count") or device.get("LogicalGpuCount") or 1
    return device.get("Name", ""), count, device.get("MemoryInfo", {}).get("SizeInMiB", 0)


def _made(name: str, facts: dict[str, Any]) -> InstanceType | None:
    architectures = facts["architectures"]
    if not {"x86_64", "arm64"} & set(architectures):
        return None
    return InstanceType(
        name=name,
        vcpus=facts["vcpus"],
        memory_gib=facts["memory_mib"] / 1024,
        architecture="x86_64" if "x86_64" in architectures else "arm64",
        accelerator=_accelerator(*facts["devices"][0]) if facts["devices"] else None,
        has_spot=facts["has_spot"],
        has_on_demand=facts["has_on_demand"],
        has_efa=facts["has_efa"],
        zones=tuple(facts["zones"]),
    )


def _accelerator(name: str, count: int, memory_mib: int) -> Accelerator:
    """Map EC2's device to an `Accelerator`, with the memory size that it is sold under.

    EC2 reports 22888 MiB for 24 GB and 40960 MiB for 40 GB: some sizes count 10^9 bytes, some 2^30. A memory size that
    the product does not come in is a fraction of a device (g6f: an eighth of an L4), and is kept as it is.
    """
    try:
        whole = Accelerator.from_name(_NAMES.get(name, name), count=count)
    except UsageError:
        return Accelerator(name or "unknown", count=count)
    if not memory_mib:
        return whole
    sizes = (memory_mib / 1024, memory_mib * 2**20 / 1e9)
    from ... import accelerators

    factory = getattr(accelerators, whole.name.replace(" ", "_").replace("-", "_"), None)
    for option in getattr(factory, "memory_options", ()):
        if any(abs(float(option.removesuffix("GB")) - size) <= 0.03 * size for size in sizes):
            return Accelerator(whole.name, memory=option, count=count, metadata=whole.metadata)
    return Accelerator(whole.name, memory=f"{round(sizes[1])}GB", count=count, metadata=whole.metadata)
