"""Ranks and slots that share devices, and the warnings about it."""

from __future__ import annotations

import pytest

from skyward.engine.devices import are_shared, sharing_of_gangs, sharing_of_pool


@pytest.mark.parametrize(
    ("devices", "processes", "is_shared"),
    [
        ([(), ()], 4, False),
        ([("a/0", "a/1"), ("b/0", "b/1")], 2, False),
        ([("a/0", "a/1"), ("b/0",)], 2, True),
        ([("a/0",), ("a/0",)], 1, True),
        ([("a/0",), ("a/1",)], 1, False),
        ([("a/0",), ()], 1, False),
    ],
)
def test_ranks_share_devices_if_there_are_too_few(
    devices: list[tuple[str, ...]], processes: int, is_shared: bool
) -> None:
    assert are_shared(devices, processes) == is_shared


def test_a_pool_shares_devices_between_slots_or_between_nodes_of_one_machine() -> None:
    assert sharing_of_pool({0: (), 1: ()}, slots=4) == ""
    assert sharing_of_pool({0: ("a/0",), 1: ("b/0",)}, slots=1) == ""
    assert "concurrency=4: the slots of a node share its 2 GPUs" in sharing_of_pool({0: ("a/0", "a/1")}, slots=4)
    assert sharing_of_pool({0: ("a/0", "a/1")}, slots=2) == ""
    assert "executor='thread'" in sharing_of_pool({0: ("a/0", "a/1")}, slots=2, are_threads=True)
    uneven = sharing_of_pool({0: ("a/0", "a/1", "a/2")}, slots=2)
    assert uneven.startswith("concurrency=2: each slot of a node has 1 of its 3 GPUs, and 1 of them stays unused;")
    assert "nodes=2: nodes on one machine share its 1 GPU," in sharing_of_pool({0: ("a/0",), 1: ("a/0",)}, slots=1)


def test_gangs_that_share_devices_are_named() -> None:
    assert sharing_of_gangs("b", "a", [2, 0], 2).startswith("'b' starts beside 'a', which runs on the same 2 GPUs of")
