"""A cancel interrupts the user code of its own task in a thread slot, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.node.slot.execute import Cancelled
from skyward.node.slot.guards import LaneGuard
from skyward.node.slot.lanes import LaneInbox
from skyward.node.slot.page import PAGE_GROUP
from skyward.wire.frames import Frame, FrameKind

ROOT = Path(__file__).parents[3]


@pytest.fixture
def inbox() -> LaneInbox:
    return LaneInbox()


@pytest.fixture
def guard(inbox: LaneInbox) -> Iterator[LaneGuard]:
    guard = guard_of_task_7(inbox)
    yield guard
    guard.end()


def guard_of_task_7(inbox: LaneInbox | None = None) -> LaneGuard:
    """Return a guard of this thread, with task 7 begun."""
    guard = LaneGuard(memoryview(bytearray(8 * PAGE_GROUP)).cast("Q"), 0)
    guard.begin_with(inbox or LaneInbox())
    guard.begin(7)
    return guard


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


def test_a_cancel_does_not_stop_a_process_that_is_traced() -> None:
    """Python 3.11 goes round in circles under a trace function while it believes that an exception waits."""
    code = (
        "import sys\n"
        "from tests.node.slot.test_lane_guard import Cancelled, guard_of_task_7, run_a_while\n"
        "guard = guard_of_task_7()\n"
        "try:\n    with guard.user_code():\n        guard.cancel(7)\n        run_a_while()\n"
        "except Cancelled:\n    guard.end()\n"
        "sys.settrace(lambda *_: None)\n"
        "print(run_a_while())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) == run_a_while()
