"""The I/O thread: frames reach their handlers, and an error affects one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from skyward.engine.reader import Reader
from skyward.engine.tasks import Received
from skyward.engine.width import Width
from skyward.errors import InternalError, NodeLost
from skyward.wire.frames import FrameKind
from tests.engine.parts import FarEnd, Parts, value_body
from tests.waiting import until


class Reading:
    """A reader, and the parts that it reports to."""

    def __init__(self, parts: Parts, **others: Any) -> None:
        self.lost: list[int] = []
        self.stopped: list[int] = []
        self.died: list[BaseException] = []
        self.reader = Reader(
            parts.ledger,
            parts.frame_handlers(others=others),
            parts.lines,
            parts.link_repair(self.lost.append),
            Width(parts.ledger, parts.dispatcher),
            parts.nodes.liveness,
            recall=parts.dispatcher.recall,
            stop=self.stopped.append,
            died=self.died.append,
        )


@pytest.fixture
def agent(parts: Parts) -> FarEnd:
    return parts.add_node(slots=2)


@pytest.fixture
def reading(parts: Parts, agent: FarEnd) -> Iterator[Reading]:
    reading = Reading(parts)
    yield reading
    parts.ledger.is_open = False
    parts.ledger.watcher.wake()
    reading.reader.join()


def test_the_thread_delivers_values_and_sends_tasks_into_the_freed_room(
    parts: Parts, agent: FarEnd, reading: Reading
) -> None:
    reading.reader.start()
    tasks = [parts.submit() for _ in range(3)]
    for task in tasks:
        agent.send(FrameKind.RESULT, task.id, value_body(task.id))
    until(lambda: all(task.told for task in tasks))
    assert [task.told for task in tasks] == [[("value", task.id)] for task in tasks]


def test_a_caller_reads_a_channel_itself(parts: Parts, agent: FarEnd, reading: Reading) -> None:
    task = parts.submit()
    agent.send(FrameKind.RESULT, task.id, value_body(1))
    reading.reader.read(parts.ledger.links[0])
    assert task.told == [("value", 1)]


def test_a_frame_whose_handler_raises_fails_one_call(parts: Parts, agent: FarEnd, reading: Reading) -> None:
    broken, sound = parts.submit(), parts.submit()
    agent.send(FrameKind.RESULT, broken.id, b"nonsense")
    agent.send(FrameKind.RESULT, sound.id, value_body(2))
    reading.reader.read(parts.ledger.links[0])
    ((_, error),) = broken.told
    assert isinstance(error, InternalError)
    assert sound.told == [("value", 2)]


def test_a_kind_without_a_handler_is_ignored(parts: Parts, agent: FarEnd, reading: Reading) -> None:
    task = parts.submit()
    agent.send(200)
    agent.send(FrameKind.RESULT, task.id, value_body(1))
    reading.reader.read(parts.ledger.links[0])
    assert task.told == [("value", 1)]


def test_the_end_of_a_link_loses_its_node(parts: Parts, agent: FarEnd, reading: Reading) -> None:
    task = parts.submit()
    agent.channel.close()
    reading.reader.read(parts.ledger.links[0])
    ((_, error),) = task.told
    assert isinstance(error, NodeLost)
    assert reading.lost == [0]
    assert not parts.ledger.links


def test_the_end_of_a_direct_line_loses_no_node(parts: Parts, agent: FarEnd, reading: Reading) -> None:
    parts.offer_line(agent).channel.close()
    line = parts.ledger.links[0].line
    assert line is not None
    reading.reader.read(line)
    assert parts.ledger.links[0].line is None
    assert reading.lost == []


def test_the_thread_stops_abandoned_calls(parts: Parts, reading: Reading) -> None:
    reading.reader.start()
    reading.reader.abandon(7)
    until(lambda: reading.stopped == [7])


def test_frames_of_many_channels_are_handled_though_one_has_ended(parts: Parts, reading: Reading) -> None:
    agents = [parts.add_node(number) for number in range(1, 40)]
    tasks = [parts.submit() for _ in agents]
    with parts.ledger.lock:
        places = [parts.ledger.scheduler.node_of(task.id) for task in tasks]
    by_place = {place: task for place, task in zip(places, tasks, strict=True) if place}
    gone, *others = by_place
    for place in others:
        agents[place - 1].send(FrameKind.RESULT, by_place[place].id, value_body(place))
    agents[gone - 1].channel.close()
    reading.reader.start()
    until(lambda: all(task.told for task in by_place.values()))
    assert isinstance(by_place[gone].told[0][1], NodeLost)
    assert [by_place[place].told for place in others] == [[("value", place)] for place in others]


def test_the_thread_is_behind_until_it_finds_no_channel_ready(parts: Parts, reading: Reading) -> None:
    agents = [parts.add_node(number) for number in range(1, 40)]
    tasks = [parts.submit() for _ in agents]
    late = parts.task()
    was_behind: list[bool] = []

    def note(received: Received) -> None:
        was_behind.append(parts.ledger.is_behind)
        parts.ledger.arrive(late)

    with parts.ledger.lock:
        places = [parts.ledger.scheduler.node_of(task.id) for task in tasks]
    by_place = {place: task for place, task in zip(places, tasks, strict=True) if place}
    next(iter(by_place.values())).on_result = note  # type: ignore[method-assign]
    for place, task in by_place.items():
        agents[place - 1].send(FrameKind.RESULT, task.id, value_body(1))
    reading.reader.start()
    until(lambda: late.id in parts.ledger.tasks and not parts.ledger.is_behind)
    assert was_behind == [True]
