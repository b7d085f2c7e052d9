"""Tasks and gangs made from packed calls, without an engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from skyward.calls.options import CallOptions
from skyward.engine.builder import PackedCall, TaskBuilder
from skyward.errors import UsageError
from skyward.values.launch import ProcessLaunch
from skyward.wire.payloads import Encoded
from skyward.wire.tasks import CallKind
from tests.engine.parts import NotedTask, function

CANCELLED: list[int] = []


@pytest.fixture
def builder() -> TaskBuilder:
    CANCELLED.clear()
    numbers = itertools.count(1)
    return TaskBuilder(lambda: next(numbers), lambda launch: 2, CANCELLED.append, default_timeout_s=5.0)


def packed(**options: Any) -> PackedCall:
    return PackedCall("work", function(), Encoded(b"arguments"), CallOptions(**options))


def task_timeout_s(builder: TaskBuilder, call: PackedCall) -> float | None:
    return builder.task(NotedTask, 7, call, CallKind.PLAIN).timeout_s


def gang_timeout_s(builder: TaskBuilder, call: PackedCall) -> float | None:
    return builder.gang(call, ProcessLaunch(), b"", nodes=None, some_of=None).options.timeout_s


@pytest.mark.parametrize("timeout_s", [task_timeout_s, gang_timeout_s])
def test_the_default_timeout_is_for_calls_without_one(
    builder: TaskBuilder, timeout_s: Callable[[TaskBuilder, PackedCall], float | None]
) -> None:
    assert timeout_s(builder, packed()) == 5.0
    assert timeout_s(builder, packed(timeout_s=9)) == 9


def test_a_part_of_a_broadcast_knows_its_place(builder: TaskBuilder) -> None:
    task = builder.task(NotedTask, 7, packed(), CallKind.BROADCAST, (1, 3, 4), rank=2)
    assert (task.id, task.rank, task.head.kind) == (7, 2, CallKind.BROADCAST)
    assert (task.head.part, task.head.parts, task.head.first_node) == (1, 3, 4)


@pytest.mark.parametrize("options", [{"max_restarts": 1}, {"hang_timeout_s": 3.0}])
def test_a_plain_call_must_not_have_options_of_gangs(builder: TaskBuilder, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="'work' uses no integration"):
        builder.task(NotedTask, 7, packed(**options), CallKind.PLAIN)


def test_a_gang_starts_with_the_limits_of_its_options(builder: TaskBuilder) -> None:
    gang = builder.gang(packed(retries=1, max_restarts=3), ProcessLaunch(), b"", nodes=(0, 1), some_of=None)
    assert (gang.retries.spend(is_node_loss=False), gang.restarts_left, gang.ranks_per_node) == (0.0, 3, 2)


def test_cancelling_the_future_of_a_gang_cancels_the_gang(builder: TaskBuilder) -> None:
    gang = builder.gang(packed(), ProcessLaunch(), b"", nodes=None, some_of=(2,))
    gang.future.cancel()
    assert [gang.id] == CANCELLED


def test_a_launch_that_is_too_large_for_one_packet_is_refused(builder: TaskBuilder) -> None:
    with pytest.raises(UsageError, match="65537 bytes exceed the limit of 65536"):
        builder.gang(packed(), ProcessLaunch(), bytes(64 * 1024 + 1), nodes=None, some_of=None)
