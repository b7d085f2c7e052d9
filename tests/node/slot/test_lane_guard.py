"""A cancel interrupts the user code of its own task in a thread slot, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skyward.node.slot.execute import Cancelled
from skyward.node.slot.guards import LaneGuard
from skyward.node.slot.lanes import LaneInbox
from skyward.node.slot.page import PAGE_GROUP
from skyward.wire.frames import Frame, FrameKind


@pytest.fixture
def inbox() -> LaneInbox:
    return LaneInbox()


@pytest.fixture
def guard(inbox: LaneInbox) -> Iterator[LaneGuard]:
    """Guard of this thread, with task 7 begun."""
    guard = LaneGuard(memoryview(bytearray(8 * PAGE_GROUP)).cast("Q"), 0)
    guard.begin_with(inbox)
    guard.begin(7)
    yield guard
    guard.end()


def run_a_while() -> int:
    return sum(abs(i) for i in range(1000))


def test_user_code_is_interrupted_once(guard: LaneGuard) -> None:
    with pytest.raises(Cancelled), guard.user_code():
        guard.cancel(7)
        run_a_while()
    guard.cancel(7)
    with guard.user_code():  # the unwinding: a generator is closed
        run_a_while()


def test_code_of_skyward_is_not_interrupted_but_user_code_does_not_begin(guard: LaneGuard) -> None:
    guard.cancel(7)
    run_a_while()
    with pytest.raises(Cancelled), guard.user_code():
        pytest.fail("user code ran")


def test_another_task_is_not_interrupted(guard: LaneGuard) -> None:
    with guard.user_code():
        guard.cancel(6)
        run_a_while()


def test_a_task_cancelled_before_it_began_does_not_begin(guard: LaneGuard, inbox: LaneInbox) -> None:
    guard.end()
    inbox.put(Frame(FrameKind.CLOSE, 0, 0, 7, b""), ())
    guard.begin_with(inbox)
    guard.begin(7)
    with pytest.raises(Cancelled), guard.user_code():
        pytest.fail("user code ran")


def test_a_task_that_has_read_its_cancellation_may_unwind(guard: LaneGuard, inbox: LaneInbox) -> None:
    inbox.put(Frame(FrameKind.CLOSE, 0, 0, 7, b""), ())
    assert inbox.wait()[0].kind == FrameKind.CLOSE
    with guard.user_code():
        run_a_while()
