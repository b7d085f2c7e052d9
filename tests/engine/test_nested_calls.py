"""Calls made by tasks: they become tasks, their values go back, and they end with the task that made them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from skyward.calls.named_options import pack_options
from skyward.calls.options import CallOptions
from skyward.engine.actors import Actors
from skyward.engine.builder import TaskBuilder
from skyward.engine.nested_calls import NestedCalls
from skyward.errors import UsageError
from skyward.schedule.actions import Refuse
from skyward.wire.blobs import Blob
from skyward.wire.frames import Frame, FrameKind
from skyward.wire.nested_calls import IS_NESTED, NestedCall, NestedOutcome, message_of, packed
from skyward.wire.payloads import encode
from tests.engine.parts import FarEnd, NotedTask, Parts, value_body

NUMBER = IS_NESTED | 5


@pytest.fixture
def agent(parts: Parts) -> FarEnd:
    return parts.add_node(slots=2)


@pytest.fixture
def nested_calls(parts: Parts) -> Iterator[NestedCalls]:
    gangs = parts.gangs()
    builder = TaskBuilder(lambda: next(parts.ledger.numbers), parts.nodes.ranks_per_node, gangs.cancel, None)
    actors = Actors(parts.ledger, parts.lines, parts.dispatcher, parts.nodes, builder, frozenset())
    nested_calls = NestedCalls(parts.ledger, parts.dispatcher, gangs, actors, builder, parts.values)
    yield nested_calls
    nested_calls.close()
    nested_calls.join()


@pytest.fixture
def parent(parts: Parts, agent: FarEnd, nested_calls: NestedCalls) -> NotedTask:
    task = parts.submit()
    agent.received()
    return task


def call(parts: Parts, nested_calls: NestedCalls, parent: int, **options: Any) -> None:
    """Make a task call a function."""
    asked = NestedCall(
        parent=parent,
        name="part",
        function=encode(len, Blob.snapshot).body,
        arguments=encode((((1, 2),), {}), Blob.snapshot).body,
        options=pack_options(CallOptions(**options)),
        launch=b"",
        kind=0,
        nodes=None,
    )
    with parts.ledger:
        nested_calls.on_call(parts.ledger.links[0], Frame(FrameKind.CALL, 0, 0, NUMBER, packed(asked, ()).body))


def outcome(agent: FarEnd) -> NestedOutcome:
    frame = agent.next(FrameKind.OUTCOME)
    assert frame.ident == NUMBER
    return NestedOutcome(*message_of(frame.body, {}))


def test_a_call_becomes_a_task_and_its_value_goes_back(
    parts: Parts, agent: FarEnd, nested_calls: NestedCalls, parent: NotedTask
) -> None:
    call(parts, nested_calls, parent.id)
    child = agent.next(FrameKind.TASK).ident
    with parts.ledger:
        parts.frame_handlers().handlers[FrameKind.RESULT](
            parts.ledger.links[0], Frame(FrameKind.RESULT, 0, 0, child, value_body(2))
        )
    assert outcome(agent).status == "value"


def test_the_calls_of_a_task_end_with_it(
    parts: Parts, agent: FarEnd, nested_calls: NestedCalls, parent: NotedTask
) -> None:
    call(parts, nested_calls, parent.id)
    child = agent.next(FrameKind.TASK).ident
    with parts.ledger:
        parts.dispatcher.finish(parent, 0)
    assert parts.ledger.tasks[child].is_cancelled
    assert outcome(agent).status == "cancelled"


def test_a_call_that_cannot_be_made_reports_the_reason(
    parts: Parts, agent: FarEnd, nested_calls: NestedCalls, parent: NotedTask
) -> None:
    call(parts, nested_calls, parent.id, max_restarts=1)
    said = outcome(agent)
    error = pickle.loads(said.payloads[0])
    assert said.status == "error"
    assert isinstance(error, UsageError)
    assert "max_restarts" in str(error)


def test_a_call_that_could_never_start_is_refused(
    parts: Parts, agent: FarEnd, nested_calls: NestedCalls, parent: NotedTask
) -> None:
    call(parts, nested_calls, parent.id)
    child = agent.next(FrameKind.TASK).ident
    with parts.ledger:
        parts.dispatcher.perform([Refuse(child, (0,))])
    said = outcome(agent)
    assert said.status == "error"
    assert "concurrency" in str(pickle.loads(said.payloads[0]))


def test_a_call_is_forgotten_when_the_node_of_its_task_is_lost(
    parts: Parts, agent: FarEnd, nested_calls: NestedCalls, parent: NotedTask
) -> None:
    call(parts, nested_calls, parent.id)
    child = agent.next(FrameKind.TASK).ident
    with parts.ledger:
        nested_calls.node_lost(0)
    assert parts.ledger.tasks[child].is_cancelled
