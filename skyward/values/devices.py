"""Devices of a node: GPUs and other accelerators, and the part of a node that one call may use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from ..core.records import dataclass

Maker = Literal["nvidia", "amd", "google", "aws"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Accelerator of a node, as a process there sees it. `sky.instance_info().devices` lists those of the process.

    Args:
        index: Number among the devices of its node, >= 0.
        id: Identifier that no other device has, such as the UUID of a GPU or of a MIG instance.
        kind: Maker: "nvidia", "amd", "google" (TPU) or "aws" (Neuron).
        name: Product in the driver's words, such as "NVIDIA A100-SXM4-40GB"; only the maker's if no more is known.
        memory_gib: Memory in GiB; 0 if it is not known.

    Example:
        >>> Device(index=0, id="GPU-8932f937", kind="nvidia", name="NVIDIA L4", memory_gib=22.5).name
        'NVIDIA L4'
    """

    index: int
    id: str
    kind: Maker
    name: str
    memory_gib: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResources:
    """Devices, cores and memory of a node, which its processes share."""

    devices: tuple[Device, ...] = ()
    cpus: int = 1
    memory_gib: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Part of a node that one call may use. Processes serve calls of equal grants only.

    Args:
        devices: Indexes among the node's devices. None: the equal share of a slot, or of a gang's rank. Empty: none is
            visible.
        gpu_share: Share of its one device, in (0, 1]; for MPS, where it runs.
        cpus: Number of cores, > 0; None: no limit of its own. The ranks of a gang on one node share it.
        memory_gib: Memory, > 0; None: no limit of its own. Shared likewise.

    Example:
        >>> Grant.parse(Grant(devices=(0, 1)).pack()).devices
        (0, 1)
    """

    devices: tuple[int, ...] | None = None
    gpu_share: float = 1.0
    cpus: float | None = None
    memory_gib: float | None = None

    @classmethod
    def of_booking(
        cls,
        devices: tuple[int, ...] | None,
        *,
        gpus: float | None = None,
        cpus: float | None = None,
        memory_gib: float | None = None,
    ) -> Grant | None:
        """Return the grant of booked devices and of the numbers that were asked for; None without any."""
        if devices is None and cpus is None and memory_gib is None:
            return None
        share = gpus if gpus is not None and 0 < gpus < 1 else 1.0
        return cls(devices=devices, gpu_share=share, cpus=cpus, memory_gib=memory_gib)

    def pack(self) -> bytes:
        """Return the body of a GRANT frame."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, body: bytes) -> Grant:
        fields = json.loads(body)
        devices = fields.pop("devices")
        return cls(devices=None if devices is None else tuple(devices), **fields)


NO_GRANT = Grant()
"""Grant of a call that asks for nothing: the equal share of a slot or rank."""


def share(devices: tuple[int, ...], part: int, parts: int) -> tuple[int, ...]:
    """Return the equal share of one of several processes. With fewer devices than processes, processes share.

    Example:
        >>> share((0, 1, 2, 3), 1, 2), share((5, 6), 2, 4)
        ((2, 3), (5,))
    """
    count = len(devices) // parts
    if count:
        return devices[part * count : (part + 1) * count]
    return (devices[part % len(devices)],) if devices else ()


def shared_view(shares: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the devices of several ranks in an order in which the first of each rank has the rank's own number.

    Example:
        >>> shared_view([(0, 1), (2, 3)])
        (0, 2, 1, 3)
    """
    longest = max(map(len, shares), default=0)
    return tuple(dict.fromkeys(own[at] for at in range(longest) for own in shares if at < len(own)))


def describe(devices: Sequence[Device]) -> str:
    """Return how many devices there are of each product; empty without any.

    Example:
        >>> describe([Device(index=at, id=str(at), kind="nvidia", name="NVIDIA L4") for at in (0, 1)])
        '2x NVIDIA L4'
    """
    counts = Counter(device.name for device in devices)
    return ", ".join(f"{count}x {name}" if count > 1 else name for name, count in counts.items())
