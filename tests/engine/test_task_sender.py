"""The sender: what it does with the scheduler's decisions, and whom it tells that a call ends."""

from __future__ import annotations

import pytest

from skyward.errors import NodeLost, PoolClosed, Preempted, TaskTimeout
from skyward.schedule.actions import FailTask, StartGang
from skyward.wire.frames import Frame, Kind
from tests.engine.parts import GRACE_S, Parts


def test_a_task_goes_to_a_node_with_its_function_once(parts: Parts) -> None:
    agent = parts.add_node(slots=2)
    tasks = [parts.submit(), parts.submit()]
    frames = agent.received()
    assert [frame.kind for frame in frames] == [Kind.FUNCTION, Kind.TASK, Kind.TASK]
    assert [frame.ident for frame in frames[1:]] == [task.id for task in tasks]


def test_what_has_no_slot_is_sent_when_one_is_free(parts: Parts) -> None:
    agent = parts.add_node(slots=1)
    first, second = parts.submit(timeout_s=60.0), parts.submit(timeout_s=60.0)
    assert agent.kinds() == [Kind.FUNCTION, Kind.TASK]
    with parts.books:
        parts.sending.finish(first, 0, elapsed_ns=1000)
    (frame,) = agent.received()
    assert (frame.kind, frame.ident) == (Kind.TASK, second.id)


def test_closed_books_refuse_a_task(parts: Parts) -> None:
    parts.books.is_open = False
    with pytest.raises(PoolClosed):
        parts.submit()
    assert not parts.books.tasks


def test_an_action_of_another_part_goes_to_its_handler(parts: Parts) -> None:
    started: list[StartGang] = []
    parts.sending.handlers[StartGang] = started.append
    with parts.books:
        parts.sending.perform([StartGang(7, (0,))])
    assert started == [StartGang(7, (0,))]


def test_those_who_must_know_are_told_once_that_a_call_ends(parts: Parts) -> None:
    ended: list[int] = []
    parts.sending.on_ended.append(ended.append)
    parts.add_node()
    task = parts.submit()
    assert ended == []
    with parts.books:
        parts.sending.finish(task, 0)
    assert ended == [task.id]
    assert not parts.books.tasks


def test_a_waiting_call_that_is_cancelled_leaves_the_books_at_once(parts: Parts) -> None:
    cancelled: list[int] = []
    parts.sending.on_cancelled.append(cancelled.append)
    agent = parts.add_node()
    sent, waiting = parts.submit(timeout_s=60.0), parts.submit(timeout_s=60.0)
    agent.received()
    with parts.books:
        for task in (waiting, sent, sent):
            parts.sending.cancel(task.id)
    assert cancelled == [waiting.id, sent.id]
    assert list(parts.books.tasks) == [sent.id]
    (frame,) = agent.received()
    assert (frame.kind, frame.ident, frame.lane) == (Kind.CANCEL, sent.id, int(GRACE_S * 10))


def test_a_call_whose_time_is_up_says_where_it_stands_and_fails(parts: Parts) -> None:
    agent = parts.add_node()
    task = parts.submit(timeout_s=0.001)
    with parts.books:
        while not parts.books.dirty:
            parts.books.run_deadlines()
    assert agent.kinds() == [Kind.FUNCTION, Kind.TASK, Kind.TAKE_STACK]
    stack = b'{"stack": "Stack (most recent call first):\\n  File \\"/home/me/run.py\\", line 7 in fit", "state": "S"}'
    with parts.books:
        parts.sending.on_stack(task, Frame(Kind.STACK, 0, 0, task.id, stack))
    ((what, error),) = task.told
    assert what == "failed"
    assert isinstance(error, TaskTimeout)
    assert "run.py" in error.__notes__[0]
    assert agent.kinds() == [Kind.CANCEL]


@pytest.mark.parametrize(("is_taken_back", "error"), [(False, NodeLost), (True, Preempted)])
def test_a_task_that_cannot_be_run_fails_with_the_loss_of_its_node(
    parts: Parts, is_taken_back: bool, error: type[Exception]
) -> None:
    parts.add_node()
    task = parts.submit()
    with parts.books:
        if is_taken_back:
            parts.books.taken_back.add(0)
        parts.books.scheduler.drop(task.id)
        parts.sending.perform([FailTask(task.id, 0, None)])
    ((_, raised),) = task.told
    assert type(raised) is error
    assert isinstance(raised, NodeLost | Preempted)
    assert (raised.node, raised.started) == (0, None)
    assert not parts.books.tasks
