"""Groups of a gang's nodes: the integrations of a rank see the ranks of its group as the whole gang.

The engine places, restarts and ends the gang as one, and `sky.instance_info()` tells of all its ranks. Only the
frameworks see less: each group has a rendezvous on its own first node. So this is a matter of the rank's process alone.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UsageError
from ...values.topology import Rank
from .ports import port_behind

_PORTS_PER_RANK = 8
"""Ports between two groups, for each rank of the first. Frameworks take up to three ports below the rendezvous, and one
above for each rank and one more. The nodes of a local pool share a machine, so groups must not meet."""

_own: Rank | None = None


def rank_in_group(rank: Rank, nodes: int) -> Rank:
    """Return a rank of a gang as one of its group of neighbouring nodes.

    Only the port of the first group is reserved. On a taken one the framework raises RendezvousFailed, and the engine
    then starts the gang again on other ports.

    Args:
        rank: Rank of the gang.
        nodes: Nodes of a group, >= 1.

    Raises:
        UsageError: The gang's nodes are not a multiple of `nodes`.
    """
    if rank.nodes % nodes:
        raise UsageError(
            f"nodes_per_worker={nodes}: does not divide the {rank.nodes} nodes of this call; call the function on a "
            "multiple of it, such as by nodes=, or set another nodes_per_worker",
            field="nodes_per_worker",
            value=nodes,
        )
    first = rank.node_rank // nodes * nodes
    ranks_before = first * rank.local_world_size
    peers = rank.peers[first : first + nodes]
    return replace(
        rank,
        rank=rank.rank - ranks_before,
        world_size=nodes * rank.local_world_size,
        node_rank=rank.node_rank - first,
        nodes=nodes,
        peers=peers,
        head_addr=peers[0].private_ip,
        head_port=port_behind(rank.head_port, _PORTS_PER_RANK * ranks_before),
    )


def enter_group(rank: Rank) -> None:
    """Set the rank that this process has in its group. A rank's process runs one call."""
    global _own  # a process has one
    _own = rank


def group_rank() -> Rank | None:
    """Return the rank that this process has in its group; None if its call is not split into groups."""
    return _own
