"""Effects of each frame from a node on its task, and on the waiting tasks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyward.engine.frame_handlers import FrameHandlers
from skyward.errors import InternalError, SlotLost
from skyward.wire.frames import Frame, FrameKind
from tests.engine.parts import FarEnd, NotedTask, Parts, failure_body, value_body


@pytest.fixture
def agent(parts: Parts) -> FarEnd:
    return parts.add_node()


@pytest.fixture
def frame_handlers(parts: Parts) -> FrameHandlers:
    return parts.frame_handlers()


def arrive(parts: Parts, frame_handlers: FrameHandlers, kind: int, task: NotedTask, body: bytes = b"") -> None:
    with parts.ledger:
        frame_handlers.handlers[kind](parts.ledger.links[0], Frame(kind, 0, 0, task.id, body))


def lost(**fields: Any) -> bytes:
    loss = {"signal": 9, "exit_code": None, "started": True, "index": None, "at": 0.0, "stack": "", **fields}
    return json.dumps(loss).encode()


def test_a_value_reaches_its_task_and_makes_room_for_the_next(
    parts: Parts, agent: FarEnd, frame_handlers: FrameHandlers
) -> None:
    first, second = parts.submit(timeout_s=60.0), parts.submit(timeout_s=60.0)
    agent.received()
    arrive(parts, frame_handlers, FrameKind.RESULT, first, value_body({"loss": 0.5}))
    assert first.told == [("value", {"loss": 0.5})]
    assert [frame.ident for frame in agent.received()] == [second.id]
    arrive(parts, frame_handlers, FrameKind.RESULT, first, value_body(1))
    assert len(first.told) == 1


def test_values_for_another_process_are_passed_on_with_the_ledger_locked(
    parts: Parts, agent: FarEnd, frame_handlers: FrameHandlers
) -> None:
    class RelayedTask(NotedTask):
        is_relayed = True

    ours, relayed = parts.submit(), parts.submit()
    relayed.__class__ = RelayedTask
    with parts.ledger:
        for task in (ours, relayed):
            frame = Frame(FrameKind.RESULT, 0, 0, task.id, value_body(1))
            frame_handlers.handlers[FrameKind.RESULT](parts.ledger.links[0], frame)
        assert (ours.told, relayed.told) == ([], [("value", 1)])
    assert ours.told == [("value", 1)]


def test_the_value_of_a_cancelled_task_is_dropped(parts: Parts, agent: FarEnd, frame_handlers: FrameHandlers) -> None:
    task = parts.submit()
    with parts.ledger:
        parts.dispatcher.cancel(task.id)
    arrive(parts, frame_handlers, FrameKind.RESULT, task, value_body(1))
    assert task.told == []
    assert not parts.ledger.tasks


def test_an_error_named_by_retry_on_starts_another_run(
    parts: Parts, agent: FarEnd, frame_handlers: FrameHandlers
) -> None:
    task = parts.submit(retries=1, retry_on=(ValueError,))
    agent.received()
    arrive(parts, frame_handlers, FrameKind.ERROR, task, failure_body(ValueError("once")))
    assert agent.kinds() == [FrameKind.TASK]
    arrive(parts, frame_handlers, FrameKind.ERROR, task, failure_body(ValueError("twice")))
    ((what, error),) = task.told
    assert what == "raised"
    assert (type(error), error.args) == (ValueError, ("twice",))


@pytest.mark.parametrize("retries", [0, 1])
def test_a_lost_process_uses_up_a_retry_or_fails_the_call(
    parts: Parts, agent: FarEnd, frame_handlers: FrameHandlers, retries: int
) -> None:
    task = parts.submit(retries=retries)
    agent.received()
    arrive(parts, frame_handlers, FrameKind.LOST, task, lost())
    assert agent.kinds() == [FrameKind.TASK] * retries
    assert [type(error) for _, error in task.told] == [SlotLost] * (1 - retries)


def test_a_recalled_task_goes_to_a_node_with_room(parts: Parts, agent: FarEnd, frame_handlers: FrameHandlers) -> None:
    task = parts.submit()
    agent.received()
    arrive(parts, frame_handlers, FrameKind.RECALLED, task)
    assert [frame.ident for frame in agent.received()] == [task.id]


def test_items_arrive_in_order_and_none_after_the_end(
    parts: Parts, agent: FarEnd, frame_handlers: FrameHandlers
) -> None:
    task = parts.submit()
    for item in (1, 2):
        arrive(parts, frame_handlers, FrameKind.ITEM, task, value_body(item))
    arrive(parts, frame_handlers, FrameKind.RESULT, task, value_body("end"))
    arrive(parts, frame_handlers, FrameKind.ITEM, task, value_body(3))
    assert task.told == [("item", 1), ("item", 2), ("value", "end")]


def test_a_frame_without_a_task_goes_to_the_handler_of_its_kind(parts: Parts, agent: FarEnd) -> None:
    ports: list[int] = []
    frame_handlers = parts.frame_handlers(others={FrameKind.PORT: lambda link, frame: ports.append(frame.lane)})
    with parts.ledger:
        frame_handlers.handlers[FrameKind.PORT](parts.ledger.links[0], Frame(FrameKind.PORT, 0, 4711, 1, b""))
    assert ports == [4711]


def test_a_frame_whose_handler_raises_fails_its_task(
    parts: Parts, agent: FarEnd, frame_handlers: FrameHandlers
) -> None:
    task = parts.submit()
    with parts.ledger:
        frame_handlers.give_up(parts.ledger.links[0], Frame(FrameKind.ERROR, 0, 0, task.id, b""), MemoryError("full"))
    ((_, error),) = task.told
    assert isinstance(error, InternalError)
    assert "full" in str(error)
    assert not parts.ledger.tasks
