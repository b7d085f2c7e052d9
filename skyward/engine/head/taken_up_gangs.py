"""Ranks that the nodes have from a head that is gone, as the next one goes on with their gangs.

A rank lives in a process of its node, and the agent leaves that to the next head. It holds what has come of a rank
until the gang is over, because only its head had the values of the others. So a gang is whole if each of its ranks
runs, or has ended and is held. A gang has not begun if no node has a rank of it, and no node is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..gang import StartedRank
from ..ledger import Ledger


def held_ranks(ledger: Ledger) -> dict[int, StartedRank]:
    """Return the ranks that the nodes have from an earlier head, by task."""
    told = [link.facts.pop("ranks", {}) for link in ledger.links.values()]
    return {int(task): StartedRank.parse(note) for ranks in told for task, note in ranks.items()}


def take_start(ranks: dict[int, StartedRank], gang: int, over: int) -> dict[int, StartedRank]:
    """Take the ranks of a gang's latest start out of all ranks, unless that start is one of those that are over."""
    own = {task: rank for task, rank in ranks.items() if rank.gang == gang and rank.restart_count >= over}
    latest = max((rank.restart_count for rank in own.values()), default=0)
    return {task: ranks.pop(task) for task, rank in own.items() if rank.restart_count == latest}


def is_whole(start: Mapping[int, StartedRank]) -> bool:
    """Return whether all ranks of a start are there."""
    sizes = {rank.world_size for rank in start.values()}
    return {rank.rank for rank in start.values()} == set(range(max(sizes, default=0))) and bool(start)
