"""Restarts of a gang: the failures that start it again, and the budget that pays for it."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.calls.options import CallOptions
from skyward.engine.gang import Gang, make_ranks
from skyward.engine.retries import Retries
from skyward.errors import GangHung, NodeLost, RendezvousFailed, SlotLost, TaskTimeout, UsageError
from skyward.values.launch import ProcessLaunch
from skyward.values.topology import Peer


def gang(**options: Any) -> Gang:
    given = CallOptions(**options)
    nothing: Any = None
    return Gang(
        id=1,
        name="train",
        launch=ProcessLaunch(),
        launch_bytes=b"",
        function=nothing,
        payload=nothing,
        head=nothing,
        options=given,
        nodes=(0, 1),
        ranks_per_node=1,
        future=nothing,
        retries=Retries(given),
        restarts_left=given.max_restarts,
    )


def starts_again(failed: Gang, *errors: BaseException) -> list[bool]:
    """Return whether the gang starts again after each of these failures."""
    again = []
    for error in errors:
        failed.failures.append((0.0, 1, error))
        again.append(failed.spend_restart() is not None)
        failed.reset()
    return again


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, [False, False, False, False]),
        ({"retries": 1}, [True, False, False, False]),
        ({"retries": 2}, [True, True, False, False]),
        ({"retries": 3, "retry_on": ValueError}, [True, True, True, False]),
        ({"max_restarts": 3}, [True, True, True, False]),
        ({"max_restarts": 1, "retries": 2}, [True, True, True, False]),
        ({"max_restarts": 2, "retries": 2}, [True, True, True, True]),
        ({"retries_on_loss": 3}, [False, True, False, False]),
        ({"retries_on_loss": 1, "retries": 1}, [True, True, False, False]),
    ],
)
def test_retries_pay_for_losses_and_max_restarts_for_all_failures(options: dict[str, Any], again: list[bool]) -> None:
    assert starts_again(gang(**options), SlotLost(), NodeLost(), ValueError(), GangHung()) == again


def test_another_port_is_tried_once_for_free() -> None:
    failed = gang(max_restarts=1)
    assert starts_again(failed, *(RendezvousFailed() for _ in range(3))) == [True, True, False]
    assert starts_again(gang(), RendezvousFailed(), RendezvousFailed()) == [True, False]


@pytest.mark.parametrize("error", [TaskTimeout(), UsageError()])
def test_a_failure_that_would_repeat_starts_no_gang(error: Exception) -> None:
    assert starts_again(gang(max_restarts=1), error, ValueError()) == [False, True]


def test_a_gang_whose_node_is_gone_for_good_fails() -> None:
    failed = gang(max_restarts=1, retries=1)
    failed.is_final = True
    assert starts_again(failed, NodeLost()) == [False]


def test_the_record_of_a_start_is_one_line_without_advice() -> None:
    failed = gang()
    starts_again(
        failed,
        SlotLost("'f': its process exited with code 3 (the pool continues); set max_restarts=1 or more if it may"),
        NodeLost("node 1 was lost: the call 'f' had begun; set retries=1 or more if it may run again"),
        ValueError("bad\nbatch"),
    )
    assert failed.past == [
        "rank 1: SlotLost: 'f': its process exited with code 3",
        "rank 1: NodeLost: node 1 was lost: the call 'f' had begun",
        "rank 1: ValueError: bad",
    ]


def test_each_rank_has_the_network_of_its_own_node() -> None:
    made = gang()
    made.placed, made.port, made.ranks_per_node = (2, 5), 21_000, 2
    peers = {node: Peer(node=node, private_ip=f"10.0.0.{node}") for node in made.placed}
    made.past = ["rank 0: ValueError: bad"]
    ranks = make_ranks(made, peers, {2: (), 5: ("gpu0",)}, {2: "eth0", 5: "ens5"})
    assert [(r.rank, r.node, r.local_addr, r.interface, r.accelerators) for r in ranks] == [
        (0, 2, "10.0.0.2", "eth0", 0),
        (1, 2, "10.0.0.2", "eth0", 0),
        (2, 5, "10.0.0.5", "ens5", 1),
        (3, 5, "10.0.0.5", "ens5", 1),
    ]
    assert {(r.head_addr, r.head_port, r.restart_count) for r in ranks} == {("10.0.0.2", 21_000, 1)}
