"""Further runs of a call: who pays for them, how long they wait, and who can stop them meanwhile. No test waits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.calls.options import CallOptions
from skyward.engine.frame_handlers import FrameHandlers
from skyward.engine.gang import Gang
from skyward.engine.gangs import Gangs
from skyward.engine.retries import Retries, RetriesLeft, pause_s
from skyward.wire.frames import Frame, FrameKind
from tests.engine.parts import FarEnd, NotedTask, Parts, failure_body


@given(
    st.floats(0.001, 1e6), st.integers(1, 10_000), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)
)
def test_a_pause_doubles_within_its_limits(first_s: float, retry: int, low: float, high: float) -> None:
    shortest, longest = pause_s(first_s, retry, 0.0), max(first_s, 300.0)
    assert first_s <= shortest <= pause_s(first_s, retry, low) <= longest * 1.5
    assert pause_s(first_s, retry, high) <= shortest * 1.5
    assert pause_s(first_s, retry + 1, 0.0) == pytest.approx(min(2 * shortest, longest))


def test_a_lost_node_spends_its_own_budget_first_and_never_waits() -> None:
    retries = Retries(CallOptions(retries=1, retries_on_loss=2, retry_delay_s=8))
    assert [retries.spend(is_node_loss=True) for _ in range(2)] == [0.0, 0.0]
    pause = retries.spend(is_node_loss=True)
    assert pause is not None
    assert 8 <= pause <= 12
    assert retries.spend(is_node_loss=True) is None
    assert Retries(CallOptions(retries_on_loss=2)).spend(is_node_loss=False) is None


def test_each_retry_waits_twice_as_long() -> None:
    retries = Retries(CallOptions(retries=3, retry_delay_s=1))
    pauses = [retries.spend(is_node_loss=False) or 0.0 for _ in range(3)]
    assert all(shortest <= pause <= 1.5 * shortest for pause, shortest in zip(pauses, (1, 2, 4), strict=True))


def test_another_process_goes_on_with_the_retries_that_are_left() -> None:
    options = CallOptions(retries=3, retries_on_loss=2, retry_delay_s=1)
    retries = Retries(options)
    retries.spend(is_node_loss=True)
    retries.spend(is_node_loss=False)
    pause = retries.spend(is_node_loss=False)
    assert pause is not None
    left = retries.left(pause)
    assert 1 < left.pause_s <= pause
    options = left.options_of(options)
    assert (options.retries, options.retries_on_loss, options.retry_delay_s) == (1, 1, 4)
    assert RetriesLeft.of(options).pause_s == 0


# The ledger holds the pause -----------------------------------------------------------------------------------------


class Time:
    """Time that only the test moves."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.now_s = 0.0
        parts.ledger.now = lambda: self.now_s

    def advance(self, seconds: float) -> float | None:
        """Let time go on. Returns the seconds until the next deadline."""
        self.now_s += seconds
        with self._parts.ledger:
            return self._parts.ledger.run_deadlines()


@pytest.fixture
def time(parts: Parts) -> Time:
    return Time(parts)


@pytest.fixture
def agent(parts: Parts) -> FarEnd:
    return parts.add_node()


def failed_once(parts: Parts, agent: FarEnd, **options: Any) -> NotedTask:
    """Return a call that may be retried and whose first run raised."""
    task = parts.submit(retries=2, retry_on=(ValueError,), retry_delay_s=10, **options)
    agent.received()
    raise_in(parts, task)
    return task


def raise_in(parts: Parts, task: NotedTask) -> None:
    deliver(parts, FrameKind.ERROR, task, failure_body(ValueError("busy")))


def deliver(parts: Parts, kind: int, task: NotedTask, body: bytes) -> None:
    handlers: FrameHandlers = parts.frame_handlers()
    with parts.ledger:
        handlers.handlers[kind](parts.ledger.links[0], Frame(kind, 0, 0, task.id, body))


def test_a_retry_starts_when_its_pause_is_over_and_not_before(parts: Parts, agent: FarEnd, time: Time) -> None:
    task = failed_once(parts, agent)
    assert 9.9 < (time.advance(9.9) or 0) + 9.9 <= 15
    assert agent.kinds() == []
    time.advance(5.1)
    assert agent.kinds() == [FrameKind.TASK]
    raise_in(parts, task)
    time.advance(19.9)
    assert agent.kinds() == []
    time.advance(10.1)
    assert agent.kinds() == [FrameKind.TASK]
    raise_in(parts, task)
    ((what, error),) = task.told
    assert (what, str(error)) == ("raised", "busy")
    assert not parts.ledger.tasks


def test_the_slot_is_free_during_the_pause(parts: Parts, agent: FarEnd, time: Time) -> None:
    failed_once(parts, agent)
    other = parts.submit()
    assert [frame.ident for frame in agent.received()] == [other.id]


def test_a_call_that_is_cancelled_during_its_pause_never_runs_again(parts: Parts, agent: FarEnd, time: Time) -> None:
    task = failed_once(parts, agent)
    with parts.ledger:
        parts.dispatcher.cancel(task.id)
    assert not parts.ledger.tasks
    time.advance(100)
    assert (agent.kinds(), task.told) == ([], [])


def test_a_pool_that_closes_finds_the_call_during_its_pause(parts: Parts, agent: FarEnd, time: Time) -> None:
    task = failed_once(parts, agent)
    with parts.ledger:
        assert parts.ledger.close_all() == ([task], [])
    time.advance(100)
    assert agent.kinds() == []


def test_a_process_that_died_waits_and_a_lost_node_does_not(parts: Parts, agent: FarEnd, time: Time) -> None:
    task = parts.submit(retries=1, retries_on_loss=1, retry_delay_s=10)
    agent.received()
    loss = {"signal": 9, "exit_code": None, "started": True, "index": None, "at": 0.0, "stack": ""}
    deliver(parts, FrameKind.LOST, task, json.dumps(loss).encode())
    assert agent.kinds() == []
    time.advance(15.1)
    assert agent.kinds() == [FrameKind.TASK]
    other = parts.add_node(1)
    with parts.ledger:
        parts.ledger.losses[task.id] = parts.ledger.node_loss(0, started=None)
        parts.dispatcher.perform(parts.ledger.scheduler.node_lost(0, will_return=True))
    assert other.kinds() == [FrameKind.FUNCTION, FrameKind.TASK]


def gang_without_a_port(parts: Parts) -> tuple[Gangs, Gang]:
    """Return a gang that may restart once, and whose first start found no port."""
    gangs = parts.gangs()
    gang = parts.gang(max_restarts=1, retry_delay_s=10)
    gang.restarts_left, gang.port_retries = 1, 0
    with parts.ledger:
        gangs.submit(gang)
        gangs.on_port(Frame(FrameKind.PORT, 0, 0, gang.id, b"none is free"))
    return gangs, gang


def test_a_gang_restarts_when_its_pause_is_over(parts: Parts, agent: FarEnd, time: Time) -> None:
    gang_without_a_port(parts)
    assert agent.kinds() == [FrameKind.RESERVE_PORT]
    time.advance(9.9)
    assert agent.kinds() == []
    time.advance(5.2)
    assert agent.kinds() == [FrameKind.RESERVE_PORT]


def test_a_gang_that_is_cancelled_during_its_pause_never_restarts(parts: Parts, agent: FarEnd, time: Time) -> None:
    gangs, gang = gang_without_a_port(parts)
    agent.received()
    assert list(parts.ledger.gangs) == [gang.id]
    with parts.ledger:
        gangs.cancel(gang.id)
    assert not parts.ledger.gangs
    time.advance(100)
    assert agent.kinds() == []
