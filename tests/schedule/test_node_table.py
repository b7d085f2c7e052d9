"""The load that each node takes, and the choice of the node for the next task."""

from __future__ import annotations

import pytest

from skyward.schedule.node_table import SHORT_TASK_NS, NodeEntry, NodeTable


def of(*slots: int, kept: tuple[int, ...] = ()) -> NodeTable:
    nodes = NodeTable(frozenset(kept))
    for number, count in enumerate(slots):
        nodes.add(NodeEntry(number, count))
    return nodes


def picked(nodes: NodeTable, numbers: tuple[int, ...] | None = None, *, ahead: bool = False) -> int | None:
    node = nodes.pick(numbers, set(), ahead=ahead)
    return None if node is None else node.id


def test_the_node_with_most_room_takes_the_next_task_and_equals_take_turns() -> None:
    assert picked(of(1, 3)) == 1
    nodes = of(2, 2)
    assert [picked(nodes) for _ in range(4)] == [0, 1, 0, 1]


def test_a_kept_node_takes_only_tasks_that_name_it() -> None:
    nodes = of(1, 9, kept=(1,))
    assert picked(nodes) == 0
    assert picked(nodes, (1,)) == 1


@pytest.mark.parametrize("state", ["is_up", "is_reachable"])
def test_an_absent_node_takes_nothing(state: str) -> None:
    nodes = of(1)
    setattr(nodes.by_id[0], state, False)
    assert picked(nodes) is None
    assert not nodes.have_room(set())
    assert not nodes.are_gone((0,))  # it may come back


def test_a_node_that_is_removed_is_gone_for_good() -> None:
    nodes = of(1, 1)
    nodes.remove(0)
    assert nodes.are_gone((0,))
    assert not nodes.are_gone((0, 1))
    assert not nodes.are_gone(None)


def test_a_full_node_takes_more_in_advance_once_tasks_are_known_to_be_short() -> None:
    nodes = of(1)
    nodes.by_id[0].sent[7] = None
    assert picked(nodes, ahead=True) is None
    nodes.took(1000)
    assert picked(nodes, ahead=True) == 0
    assert picked(nodes, ahead=False) is None
    for _ in range(40):
        nodes.took(10 * SHORT_TASK_NS)
    assert picked(nodes, ahead=True) is None


def test_an_estimate_counts_only_if_it_is_shorter_than_the_measured_time() -> None:
    nodes = of(1)
    nodes.expect(1e12)
    assert nodes.most_ahead(nodes.by_id[0]) == 0
    nodes.expect(1000.0)
    assert nodes.most_ahead(nodes.by_id[0]) == 2


def test_idle_slots_are_reported_only_if_another_node_has_more_than_it_can_run() -> None:
    nodes = of(1, 2)
    assert nodes.idle_slots() == {}
    nodes.by_id[0].sent.update({1: None, 2: None})
    idle = nodes.idle_slots()
    assert idle == {1: 2}
    assert nodes.take_idle(idle, None)
    assert not nodes.take_idle(idle, (0,))
    assert nodes.take_idle(idle, (1,))
    assert idle == {}
