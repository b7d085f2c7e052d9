"""Groups of a gang's nodes, as frameworks see them."""

from __future__ import annotations

import pytest

from skyward.errors import UsageError
from skyward.node.slot.groups import rank_in_group
from skyward.values.topology import Peer, Rank

NODES, LOCAL = 4, 2
PEERS = tuple(Peer(node=10 + node, private_ip=f"10.0.0.{node}") for node in range(NODES))


def rank_of(number: int) -> Rank:
    node = number // LOCAL
    return Rank(
        rank=number,
        world_size=NODES * LOCAL,
        local_rank=number % LOCAL,
        local_world_size=LOCAL,
        node=10 + node,
        node_rank=node,
        nodes=NODES,
        head_addr=PEERS[0].private_ip,
        head_port=20_100,
        local_addr=PEERS[node].private_ip,
        peers=PEERS,
    )


def test_each_group_is_a_gang_of_its_own() -> None:
    ranks = [rank_in_group(rank_of(number), 2) for number in range(NODES * LOCAL)]
    assert [(rank.rank, rank.world_size, rank.node_rank, rank.nodes) for rank in ranks] == [
        (number % 4, 4, number % 4 // LOCAL, 2) for number in range(NODES * LOCAL)
    ]
    assert [rank.head_addr for rank in ranks] == ["10.0.0.0"] * 4 + ["10.0.0.2"] * 4
    assert {rank.peers for rank in ranks} == {PEERS[:2], PEERS[2:]}
    assert [rank.node for rank in ranks] == [10, 10, 11, 11, 12, 12, 13, 13]


def test_ports_of_groups_on_one_machine_do_not_meet() -> None:
    """Frameworks take three below the rendezvous, and one above for each rank."""
    heads = sorted({rank_in_group(rank_of(number), 1).head_port for number in range(NODES * LOCAL)})
    assert len(heads) == NODES
    taken = [port for head in heads for port in range(head - 3, head + LOCAL + 1)]
    assert len(set(taken)) == len(taken)


def test_nodes_that_no_groups_of_the_size_make_are_refused() -> None:
    with pytest.raises(UsageError, match=r"nodes_per_worker=3: does not divide the 4 nodes of this call; call"):
        rank_in_group(rank_of(0), 3)
