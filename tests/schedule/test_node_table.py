"""The load that each node takes, and the choice of the node for the next task."""

from __future__ import annotations

import pytest

from skyward.schedule.node_table import SHORT_TASK_NS, NodeTable, rounded


def of(*slots: int, kept: tuple[int, ...] = ()) -> NodeTable:
    nodes = NodeTable(frozenset(kept))
    for number, count in enumerate(slots):
        nodes.add(number, count)
    return nodes


def picked(nodes: NodeTable, numbers: tuple[int, ...] | None = None, *, ahead: bool = False) -> int | None:
    node = nodes.pick(nodes.group(numbers), 1, ahead=ahead)
    return None if node is None else node.id


def send(nodes: NodeTable, node: int, *tasks: int) -> None:
    for task in tasks:
        nodes.by_id[node].sent[task] = None
        nodes.refile(nodes.by_id[node])


def test_the_node_with_most_room_takes_the_next_task_and_equals_take_turns() -> None:
    assert picked(of(1, 3)) == 1
    nodes = of(2, 2)
    chosen = []
    for task in range(4):
        node = picked(nodes)
        assert node is not None
        send(nodes, node, task)
        chosen.append(node)
    assert chosen == [0, 1, 0, 1]


def test_a_kept_node_takes_only_tasks_that_name_it() -> None:
    nodes = of(1, 9, kept=(1,))
    assert picked(nodes) == 0
    assert picked(nodes, (1,)) == 1


@pytest.mark.parametrize("state", ["is_up", "is_reachable"])
def test_an_absent_node_takes_nothing(state: str) -> None:
    nodes = of(1)
    setattr(nodes.by_id[0], state, False)
    nodes.refile(nodes.by_id[0])
    assert picked(nodes) is None
    assert not nodes.open.free_places
    assert not nodes.are_gone((0,))  # it may come back


def test_a_node_that_is_removed_is_gone_for_good() -> None:
    nodes = of(1, 1)
    nodes.remove(0)
    assert nodes.are_gone((0,))
    assert not nodes.are_gone((0, 1))
    assert not nodes.are_gone(None)


def test_a_full_node_takes_more_in_advance_once_tasks_are_known_to_be_short() -> None:
    nodes = of(1)
    send(nodes, 0, 7)
    assert picked(nodes, ahead=True) is None
    nodes.took(1000)
    assert picked(nodes, ahead=True) == 0
    assert picked(nodes, ahead=False) is None
    for _ in range(40):
        nodes.took(10 * SHORT_TASK_NS)
    assert picked(nodes, ahead=True) is None


def test_an_estimate_counts_only_if_it_is_shorter_than_the_measured_time() -> None:
    nodes = of(1)
    kind = nodes.by_id[0].kind
    nodes.expect(1e12)
    assert nodes.most_ahead(kind) == 0
    nodes.expect(5e6)
    assert nodes.most_ahead(kind) == 2


@pytest.mark.parametrize(("mean_ns", "ahead"), [(5e6, 2), (5e5, 2 * 8), (1000.0, 2 * 256)])
def test_the_shorter_the_tasks_the_more_a_slot_has_in_advance(mean_ns: float, ahead: int) -> None:
    nodes = of(2)
    nodes.expect(mean_ns)
    assert nodes.most_ahead(nodes.by_id[0].kind) == ahead


def test_a_group_follows_its_nodes_also_when_others_have_taken_its_place() -> None:
    nodes = of(*[1] * 100)
    for first in range(99):
        assert picked(nodes, (first, first + 1)) == first
    send(nodes, 0, 1)
    assert picked(nodes, (0, 1)) == 1
    assert all(len(node.groups) < 40 for node in nodes.by_id.values()), "groups of the past are forgotten"


def test_a_distant_node_takes_more_as_tasks_become_shorter_until_their_own_cost_counts() -> None:
    nodes = of(2)
    nodes.set_round_trip(nodes.by_id[0], 1e9)
    assert [nodes.took(elapsed_ns) for elapsed_ns in (10**8, 10**7, 10**9)] == [True, True, False]
    while nodes.took(1000):
        continue
    before = nodes.most_ahead(nodes.by_id[0].kind)
    assert not any(nodes.took(1) for _ in range(100))
    assert nodes.most_ahead(nodes.by_id[0].kind) == before


@pytest.mark.parametrize("round_trip_ns", [1.0, 999.0, 1e6, 50e6, 3e9])
def test_round_trips_are_rounded_up_by_less_than_a_fifteenth(round_trip_ns: float) -> None:
    assert round_trip_ns <= rounded(round_trip_ns) <= round_trip_ns * 16 / 15
