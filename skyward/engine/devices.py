"""Which calls share devices. Nothing books devices yet, so who shares them is told of it.

Devices are named by node facts: no two of one machine, and none of two machines, have the same name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

__all__ = ["are_shared", "sharing_of_gangs", "sharing_of_pool"]

_CHOOSE = (
    "choose one in the function, such as torch.cuda.set_device(info.worker % info.accelerators) with "
    "info = sky.instance_info()"
)


def are_shared(devices: Iterable[Collection[str]], processes: int) -> bool:
    """Whether two processes meet on a device where each node has `devices` and runs `processes`."""
    nodes = [own for own in devices if own]
    distinct = {device for own in nodes for device in own}
    return len(distinct) < sum(map(len, nodes)) or any(len(own) < processes for own in nodes)


def sharing_of_pool(devices: Mapping[int, Collection[str]], slots: int) -> str:
    """What is shared in a pool whose nodes have these devices, and what to do about it; empty: nothing is."""
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
            "share memory and time of a GPU; set nodes to the number of GPUs, or to 1"
        )
    return ""


def sharing_of_gangs(name: str, other: str, nodes: Collection[int], count: int) -> str:
    """What to say when a gang starts where another one runs: both have `count` devices of the nodes."""
    where = f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"
    return (
        f"{name!r} starts beside {other!r}, which runs on the same {_count(count)} of {where}: both begin with the "
        "first. Set concurrency=1, and one waits for the other; or give each its own GPUs: "
        "torch.cuda.set_device(...), CUDA_VISIBLE_DEVICES"
    )


def _count(devices: int) -> str:
    return f"{devices} GPU{'s' if devices != 1 else ''}"
