"""Gangs: their ranks start at one port and end together."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from skyward.engine.frame_handlers import FrameHandlers
from skyward.engine.gang import Gang, RankTask
from skyward.engine.gangs import Gangs
from skyward.errors import NodeLost, RendezvousFailed, TaskTimeout
from skyward.wire.frames import Frame, FrameKind
from tests.engine.parts import GRACE_S, FarEnd, Parts, failure_body, value_body


@pytest.fixture
def agents(parts: Parts) -> list[FarEnd]:
    return [parts.add_node(node) for node in (0, 1)]


@pytest.fixture
def gangs(parts: Parts) -> Gangs:
    return parts.gangs()


@pytest.fixture
def frame_handlers(parts: Parts, gangs: Gangs) -> FrameHandlers:
    return parts.frame_handlers(on_rank_stack=gangs.on_stack)


@pytest.fixture
def start(parts: Parts, agents: list[FarEnd], gangs: Gangs) -> Callable[..., Gang]:
    def start(**options: float) -> Gang:
        gang = parts.gang((0, 1), **options)
        with parts.ledger:
            gangs.submit(gang)
            gangs.on_port(Frame(FrameKind.PORT, 0, 4711, gang.id, b""))
        return gang

    return start


def arrive(parts: Parts, frame_handlers: FrameHandlers, kind: int, task: RankTask, body: bytes = b"") -> None:
    with parts.ledger:
        frame_handlers.handlers[kind](parts.ledger.links[task.node], Frame(kind, 0, 0, task.id, body))


def test_ranks_start_at_the_port_that_the_first_node_picks(parts: Parts, agents: list[FarEnd], gangs: Gangs) -> None:
    gang = parts.gang((0, 1))
    with parts.ledger:
        gangs.submit(gang)
    assert [agent.kinds() for agent in agents] == [[FrameKind.RESERVE_PORT], []]
    with parts.ledger:
        gangs.on_port(Frame(FrameKind.PORT, 0, 4711, gang.id, b""))
    for number, agent in enumerate(agents):
        frames = agent.received()
        assert [frame.kind for frame in frames] == [FrameKind.RANK, FrameKind.FUNCTION, FrameKind.TASK]
        rank = pickle.loads(frames[0].body).rank
        assert (rank.rank, rank.world_size, rank.head_port) == (number, 2, 4711)


def test_the_value_of_a_gang_holds_the_value_of_each_node(
    parts: Parts, agents: list[FarEnd], frame_handlers: FrameHandlers, start: Callable[..., Gang]
) -> None:
    gang = start()
    for agent in agents:
        agent.received()
    for rank in (1, 0):
        arrive(parts, frame_handlers, FrameKind.RESULT, gang.tasks[rank], value_body(rank * 10))
    assert gang.future.result(0) == [0, 10]
    assert agents[0].kinds() == [FrameKind.RELEASE_PORT]
    assert not parts.ledger.gangs
    assert not parts.ledger.tasks


def test_a_gang_that_is_cancelled_stops_its_ranks(
    parts: Parts, agents: list[FarEnd], gangs: Gangs, start: Callable[..., Gang]
) -> None:
    gang = start()
    for agent in agents:
        agent.received()
    with parts.ledger:
        gangs.cancel(gang.id)
    for agent in agents:
        (frame,) = agent.received()
        assert (frame.kind, frame.lane) == (FrameKind.CANCEL, int(GRACE_S * 10))


def test_the_error_of_a_gang_is_that_of_the_rank_that_failed(
    parts: Parts, agents: list[FarEnd], frame_handlers: FrameHandlers, start: Callable[..., Gang]
) -> None:
    gang = start()
    ranks = dict(gang.tasks)
    arrive(parts, frame_handlers, FrameKind.ERROR, ranks[1], failure_body(ValueError("bad batch")))
    assert not gang.future.done()
    arrive(parts, frame_handlers, FrameKind.RESULT, ranks[0], value_body(0))
    with pytest.raises(ValueError, match="bad batch"):
        gang.future.result(0)


def test_a_gang_that_times_out_says_where_its_ranks_are(
    parts: Parts, agents: list[FarEnd], frame_handlers: FrameHandlers, start: Callable[..., Gang]
) -> None:
    gang = start(timeout_s=0.001)
    ranks = dict(gang.tasks)
    for agent in agents:
        agent.received()
    with parts.ledger:
        while gang.late is None:
            parts.ledger.run_deadlines()
    assert [agent.kinds() for agent in agents] == [[FrameKind.TAKE_STACK], [FrameKind.TAKE_STACK]]
    for rank in (0, 1):
        arrive(parts, frame_handlers, FrameKind.STACK, ranks[rank], b'{"stack": "", "state": "S"}')
    assert [agent.kinds() for agent in agents] == [[FrameKind.CANCEL], [FrameKind.CANCEL]]
    for rank in (0, 1):
        arrive(parts, frame_handlers, FrameKind.RECALLED, ranks[rank])
    with pytest.raises(TaskTimeout):
        gang.future.result(0)


def test_a_gang_without_a_free_port_fails(parts: Parts, agents: list[FarEnd], gangs: Gangs) -> None:
    gang = parts.gang((0, 1))
    gang.port_retries = 0
    with parts.ledger:
        gangs.submit(gang)
        gangs.on_port(Frame(FrameKind.PORT, 0, 0, gang.id, b"none is free"))
    with pytest.raises(RendezvousFailed, match="none is free"):
        gang.future.result(0)


def test_a_gang_that_waits_for_the_port_of_a_lost_node_fails(parts: Parts, agents: list[FarEnd], gangs: Gangs) -> None:
    gang = parts.gang((0, 1))
    with parts.ledger:
        gangs.submit(gang)
        gangs.node_lost(0)
    with pytest.raises(NodeLost):
        gang.future.result(0)
