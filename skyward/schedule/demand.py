"""Work of a pool at one moment, as its scheduler sees it, for the decision how many nodes it should have."""

from __future__ import annotations

import math
from collections.abc import Collection

from .groups import GangEntry, TaskEntry
from .node_table import NodeTable
from .resources import PLAIN
from .scaling import Demand
from .waiting_lines import WaitingLines


def measure_demand(
    nodes: NodeTable, tasks: dict[int, TaskEntry], waiting: WaitingLines, resting: Collection[int]
) -> Demand:
    """Return the work by node, and the work that waits. `resting`: nodes that are not there, and may come.

    Work is counted in slots. A call with numbers counts as many as it leaves no resources for.
    """
    named: set[int] = set()
    slots = 0.0
    for line in waiting.lines:
        entry = line.first
        if entry.nodes is None:
            slots += nodes.places_of(entry.need or PLAIN) * line.count * entry.node_count
            continue
        absent = [n for n in entry.nodes if n in resting]
        if isinstance(entry, GangEntry):
            named.update(absent)
        elif len(absent) == len(entry.nodes):
            named.add(absent[0])
    there = [node for node in nodes.by_id.values() if node.id not in resting]
    used = {n.id for n in there if n.gang_places or any((tasks[t].nodes or ()) == (n.id,) for t in n.sent)}
    return Demand(
        loads={node.id: node.places_in_use for node in there},
        used=frozenset(used),
        waiting=math.ceil(slots) + sum(max(0, node.load - node.slots) for node in there),
        named=frozenset(named),
        known=frozenset(nodes.by_id),
        mean_s=nodes.mean_s,
    )
