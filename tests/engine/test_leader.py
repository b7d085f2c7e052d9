"""Callers that read their answer from the channel themselves."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.calls.futures import Future
from skyward.engine.leader import Leader
from skyward.engine.tasks import CallTask
from skyward.wire.frames import FrameKind
from tests.engine.parts import FarEnd, Parts, value_body
from tests.engine.test_reader import Reading


@pytest.fixture
def agent(parts: Parts) -> FarEnd:
    return parts.add_node(slots=2)


@pytest.fixture
def leader(parts: Parts, agent: FarEnd, monkeypatch: pytest.MonkeyPatch) -> Leader:
    monkeypatch.setattr("skyward.engine.leader.LEAD_S", 60.0)  # the answers are there, but a busy machine stands still
    return Leader(parts.ledger, parts.dispatcher, Reading(parts).reader.read)


def call(parts: Parts) -> tuple[CallTask, Future[Any]]:
    future: Future[Any] = Future()
    made = parts.task()
    task = CallTask(
        id=made.id, name="call", head=made.head, function=made.function, payload=made.payload, options=made.options,
        future=future,
    )  # fmt: skip
    return task, future


def answer(end: FarEnd, task: CallTask, value: object) -> None:
    """Play the slot or the agent: the answer is there before anybody reads."""
    end.send(FrameKind.RESULT, task.id, value_body(value))


def test_a_lone_call_uses_the_line_and_its_caller_reads_the_answer(parts: Parts, agent: FarEnd, leader: Leader) -> None:
    slot = parts.offer_line(agent)
    task, future = call(parts)
    answer(slot, task, 5)
    leader.submit(task, future)
    assert future.done()
    assert future.result() == 5
    assert agent.kinds() == []


def test_without_a_line_the_caller_reads_the_link(parts: Parts, agent: FarEnd, leader: Leader) -> None:
    task, future = call(parts)
    answer(agent, task, 6)
    leader.submit(task, future)
    assert future.done()
    assert future.result() == 6
    assert not parts.ledger.links[0].is_led


def test_a_caller_that_waits_later_reads_its_answer_too(parts: Parts, agent: FarEnd, leader: Leader) -> None:
    slot = parts.offer_line(agent)
    task, future = call(parts)
    with parts.ledger:
        assert leader.is_idle
        leader.submit_unled(task)
        assert not leader.is_idle
    answer(slot, task, 7)
    leader.lead(task.id, future)
    assert future.done()
    assert future.result() == 7


def test_buffers_stay_in_memory_only_for_a_lone_call_to_nodes_with_lines(
    parts: Parts, agent: FarEnd, leader: Leader
) -> None:
    leader.can_pull = True
    assert not leader.may_pull()
    parts.offer_line(agent)
    assert leader.may_pull()
    parts.submit()
    assert not leader.may_pull()
