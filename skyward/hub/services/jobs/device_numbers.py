"""Numbers of the devices that an attempt may use, so that two jobs on one node never see the same ones."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

from ...model.capacity import MachineSetSpec
from ...store.attempts import AttemptRow


def assign_devices(
    machines: MachineSetSpec, nodes: Sequence[int], each: int, active: Iterable[AttemptRow], victims: Collection[int]
) -> str | None:
    """Give an attempt the lowest numbers that are free on all of its nodes.

    They are the same on each node, because a pool has one environment for all of its nodes.

    Args:
        machines: The set.
        nodes: Numbers of the nodes.
        each: Devices on each node.
        active: Attempts that hold machines.
        victims: Numbers (pk) of those that end before this one begins.

    Returns:
        The column `nodes` of the attempt; None if no such numbers are free.
    """
    if not machines.has_numbers or not nodes:
        return json.dumps(list(nodes))
    taken: set[int] = set()
    for attempt in active:
        is_beside = attempt.machines == machines.name and not set(nodes).isdisjoint(attempt.node_numbers)
        has_machines = attempt.ended_at is None or attempt.kept_until is not None
        if is_beside and has_machines and attempt.pk not in victims:
            taken.update(attempt.device_numbers)
    free = [number for number in range(machines.devices) if number not in taken][:each]
    return json.dumps({str(node): free for node in nodes}) if len(free) == each else None
