"""Streams of running tasks: items and credit go to their node, and a task without a reader is stopped."""

from __future__ import annotations

import pytest

from skyward.calls.undecoded import Undecoded
from skyward.engine.open_streams import OpenStreams
from skyward.engine.tasks import StreamTask
from skyward.errors import PoolClosed
from skyward.wire.frames import FrameKind
from skyward.wire.payloads import Encoded
from tests.engine.parts import FarEnd, Parts


@pytest.fixture
def agent(parts: Parts) -> FarEnd:
    return parts.add_node()


@pytest.fixture
def streams(parts: Parts) -> OpenStreams:
    return OpenStreams(parts.ledger, parts.dispatcher)


def generator(parts: Parts, told: list[BaseException | Undecoded] | None = None) -> StreamTask:
    class Noted(StreamTask):
        def on_failed(self, error: BaseException | Undecoded) -> None:
            if told is not None:
                told.append(error)

    made = parts.task()
    task = Noted(
        id=made.id, name="items", head=made.head, function=made.function, payload=made.payload, options=made.options,
        stream=lambda: None, may_move=False,
    )  # fmt: skip
    with parts.ledger:
        parts.dispatcher.submit(task, None)
    return task


def test_items_and_credit_go_to_the_node_of_the_task(parts: Parts, agent: FarEnd, streams: OpenStreams) -> None:
    task = parts.submit()
    agent.received()
    streams.grant(task.id, 3)
    streams.send_item(task.id, 1, Encoded(b"item"))
    streams.end_input(task.id, FrameKind.IN_END, 1)
    frames = agent.received()
    assert [(frame.kind, frame.lane, frame.body) for frame in frames] == [
        (FrameKind.CREDIT, 0, (3).to_bytes(4, "little")),
        (FrameKind.IN_ITEM, 1, b"item"),
        (FrameKind.IN_END, 1, b""),
    ]


def test_frames_for_an_ended_task_are_dropped(parts: Parts, agent: FarEnd, streams: OpenStreams) -> None:
    streams.grant(99, 1)
    streams.send_item(99, 0, Encoded(b"item"))
    streams.end_input(99, FrameKind.IN_END, 0)
    assert agent.received() == []


def test_an_unread_stream_is_closed_and_other_tasks_are_cancelled(
    parts: Parts, agent: FarEnd, streams: OpenStreams
) -> None:
    items = generator(parts)
    waiting = parts.submit()
    agent.received()
    streams.stop(items.id)
    streams.stop(waiting.id)
    assert agent.kinds() == [FrameKind.CLOSE]
    assert list(parts.ledger.tasks) == [items.id]


def test_readers_of_running_generators_learn_that_the_pool_closes(
    parts: Parts, agent: FarEnd, streams: OpenStreams
) -> None:
    told: list[BaseException | Undecoded] = []
    generator(parts, told)
    streams.close_all()
    assert [type(error) for error in told] == [PoolClosed]
    assert FrameKind.CLOSE in agent.kinds()
