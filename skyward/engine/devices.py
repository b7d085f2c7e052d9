"""Warnings about calls that share devices. skyward does not reserve devices, so it warns users instead.

Devices have unique names, within a machine and across machines; the facts of a node list them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

_CHOOSE = (
    "choose one in the function, such as torch.cuda.set_device(info.worker % info.accelerators) with "
    "info = sky.instance_info()"
)


def are_shared(devices: Iterable[Collection[str]], processes: int) -> bool:
    """Tell whether processes share a device if each node runs that many.

    Args:
        devices: Devices of each node.
        processes: Number of processes on each node.
    """
    nodes = [own for own in devices if own]
    distinct = {device for own in nodes for device in own}
    return len(distinct) < sum(map(len, nodes)) or any(len(own) < processes for own in nodes)


def sharing_of_pool(devices: Mapping[int, Collection[str]], slots: int) -> str:
    """Describe which calls of a pool share devices, and what to do about it. Return "" if none do.

    Args:
        devices: Devices of each node, by node number.
        slots: Number of slots on each node.
    """
    distinct = {device for own in devices.values() for device in own}
    if not distinct:
        return ""
    if slots > 1:
        most = max(len(own) for own in devices.values())
        return (
            f"concurrency={slots}: the slots of a node share its {_count(most)}, and each call begins with the first; "
            f"{_CHOOSE}, or set concurrency=1"
        )
    if are_shared(devices.values(), 1):
        return (
            f"nodes={len(devices)}: nodes on one machine share its {_count(len(distinct))}, so calls that run at once "
            "share a GPU's memory and time; set nodes to the number of GPUs, or to 1"
        )
    return ""


def sharing_of_gangs(name: str, other: str, nodes: Collection[int], count: int) -> str:
    """Describe a gang that starts on the devices of another one.

    Args:
        name: Name of the gang that starts.
        other: Name of the gang that runs.
        nodes: Nodes that both use.
        count: Number of devices on these nodes.
    """
    where = f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"
    return (
        f"{name!r} starts beside {other!r}, which runs on the same {_count(count)} of {where}: both begin with the "
        "first; set concurrency=1 to run one after the other, or give each its own GPUs with "
        "torch.cuda.set_device(...) or CUDA_VISIBLE_DEVICES"
    )


def _count(devices: int) -> str:
    return f"{devices} GPU{'s' if devices != 1 else ''}"
