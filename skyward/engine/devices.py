"""Warnings about calls that share devices, or leave some unused.

Devices have unique identifiers, within a machine and across machines; the facts of a node list them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


def are_shared(devices: Iterable[Collection[str]], processes: int) -> bool:
    """Tell whether processes share a device if each node runs that many.

    Args:
        devices: Devices of each node.
        processes: Number of processes on each node.
    """
    nodes = [own for own in devices if own]
    distinct = {device for own in nodes for device in own}
    return len(distinct) < sum(map(len, nodes)) or any(len(own) < processes for own in nodes)


def sharing_of_pool(devices: Mapping[int, Collection[str]], slots: int, *, are_threads: bool = False) -> str:
    """Describe which calls of a pool share devices or leave some unused, and what to do. Return "" if none do.

    Args:
        devices: Devices of each node, by node number.
        slots: Number of slots on each node.
        are_threads: Whether the slots of a node are threads of one process, which sees all devices.
    """
    distinct = {device for own in devices.values() for device in own}
    if not distinct:
        return ""
    counts = [len(own) for own in devices.values() if own]
    if slots > 1 and are_threads:
        return (
            f"executor='thread': the calls of a node share its {_count(max(counts))}, and each begins with the first; "
            "choose one in the function, such as torch.device('cuda', info.worker % info.accelerators) with "
            "info = sky.instance_info(), or set executor='process'"
        )
    if slots > min(counts):
        return (
            f"concurrency={slots}: the slots of a node share its {_count(min(counts))}, so calls that run at once "
            f"share a GPU's memory and time; set concurrency={min(counts)} or less"
        )
    if unused := max(count % slots for count in counts):
        return (
            f"concurrency={slots}: each slot of a node has {max(counts) // slots} of its {_count(max(counts))}, and "
            f"{unused} of them stay{'s' if unused == 1 else ''} unused; set concurrency to a number that divides them"
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
        f"{name!r} starts beside {other!r}, which runs on the same {_count(count)} of {where}, so they share memory "
        "and time; set concurrency=1 to run one after the other, or send them to different nodes"
    )


def _count(devices: int) -> str:
    return f"{devices} GPU{'s' if devices != 1 else ''}"
