"""Reasons in words: why a call waits, and why no node can ever hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .groups import GangEntry, Line, NodeEntry
from .node_table import NodeTable
from .resources import PLAIN, UNIT, Need, Stock, gib, gpus, number

_MOST_SUPPLIES = 4


def cannot_hold(nodes: Sequence[NodeEntry], need: Need, count: int, able: int) -> str:
    """Describe a need that too few nodes can ever hold, and what they have."""
    supplies = Counter(str(node.stock.supply) for node in nodes if node.stock is not None)
    shown = "; ".join(f"{number} x ({supply})" for supply, number in supplies.most_common(_MOST_SUPPLIES))
    more = "; ..." if len(supplies) > _MOST_SUPPLIES else ""
    there = f"the nodes have {shown}{more}" if shown else "the pool has no such node"
    if count == 1:
        return f"no node can ever hold {need.each}; {there}; ask for less, or open a pool with other nodes"
    return (
        f"{count} nodes with {need.each} each, but {able} can hold that; {there}; ask for less, or open a pool with "
        "more nodes"
    )


def why_blocked(line: Line, table: NodeTable, *, is_first: bool) -> str:
    """Describe what the first entry of a waiting line lacks."""
    if not is_first:
        return f"{why_blocked(line, table, is_first=True)}, behind older calls"
    entry = line.first
    need = entry.need or PLAIN
    nodes = [node for node in table.candidates(_numbers(line)) if node.can_hold(need)]
    there = [node for node in nodes if node.takes_more]
    if isinstance(entry, GangEntry):
        count = len(entry.nodes) if entry.nodes is not None else entry.count
        free = sum(node.room_for(need) > 0 for node in there)
        each = f" with {need.each} each" if need.has_numbers or need.slots > 1 else ""
        if count > 1:
            if free >= count:
                return f"waits for {count} nodes{each}: older calls go first"
            return f"waits for {count} nodes{each}: {free} free"
    if not there:
        return f"waits for a node: {'none is' if not nodes else 'those that it may go to are not'} there"
    fitting = [node for node in there if node.room_for(need) > 0]
    if fitting:
        return f"waits for {need.each}: older calls go first"
    best = max(there, key=lambda node: node.room_for(need))
    return f"waits for {_lack(best, need)}"


def _numbers(line: Line) -> tuple[int, ...] | None:
    entry = line.first
    return entry.nodes or entry.some_of if isinstance(entry, GangEntry) else entry.nodes


def _lack(node: NodeEntry, need: Need) -> str:
    """Return what the node lacks for a need, such as "2 GPUs: 1 free"."""
    slots = min(need.slots, node.slots)
    if slots and node.room < slots:
        return f"{'a slot' if slots == 1 else f'{slots} slots'}: {max(0, node.room)} free"
    stock = node.stock
    assert stock is not None, "without a stock, slots are all that a node may lack"
    if stock.cpus < need.cpus:
        return f"{number(need.cpus)} CPU{'s' if need.cpus != UNIT else ''}: {number(stock.cpus)} free"
    if stock.memory_mib < need.memory_mib:
        return f"{gib(need.memory_mib)} GiB of memory: {gib(stock.memory_mib)} free"
    return f"{gpus(stock.amount(need), need.accelerator)}: {_free(stock, need)}"


def _free(stock: Stock, need: Need) -> str:
    if stock.users:
        return f"{stock.users} call{'s' if stock.users != 1 else ''} without a number of GPUs must end first"
    held = sum(len(booking.devices or ()) for booking in stock.lasting)
    return f"{stock.free_devices(need.accelerator)} free{f', actors hold {held}' if held else ''}"
