"""The dispatcher: it carries out the scheduler's decisions, and reports when a call ends."""

from __future__ import annotations

from collections import deque

import pytest

from skyward.engine.tasks import Task
from skyward.errors import NodeLost, PoolClosed, Preempted, TaskTimeout
from skyward.schedule.actions import FailTask, StartGang
from skyward.schedule.home import LOOK_S
from skyward.wire.frames import Frame, FrameKind
from tests.engine.parts import GRACE_S, Parts


def test_a_task_goes_to_a_node_with_its_function_once(parts: Parts) -> None:
    agent = parts.add_node(slots=2)
    tasks = [parts.submit(), parts.submit()]
    frames = agent.received()
    assert [frame.kind for frame in frames] == [FrameKind.FUNCTION, FrameKind.TASK, FrameKind.TASK]
    assert [frame.ident for frame in frames[1:]] == [task.id for task in tasks]


def test_a_task_without_a_slot_is_sent_when_one_is_free(parts: Parts) -> None:
    agent = parts.add_node(slots=1)
    first, second = parts.submit(timeout_s=60.0), parts.submit(timeout_s=60.0)
    assert agent.kinds() == [FrameKind.FUNCTION, FrameKind.TASK]
    with parts.ledger:
        parts.dispatcher.finish(first, 0, elapsed_ns=1000)
    (frame,) = agent.received()
    assert (frame.kind, frame.ident) == (FrameKind.TASK, second.id)


def test_a_closed_ledger_refuses_a_task(parts: Parts) -> None:
    parts.ledger.is_open = False
    with pytest.raises(PoolClosed):
        parts.submit()
    assert not parts.ledger.tasks


def test_an_action_of_another_part_goes_to_its_handler(parts: Parts) -> None:
    started: list[StartGang] = []
    parts.dispatcher.handlers[StartGang] = started.append
    with parts.ledger:
        parts.dispatcher.perform([StartGang(7, (0,))])
    assert started == [StartGang(7, (0,))]


def test_listeners_are_told_once_that_a_call_ends(parts: Parts) -> None:
    ended: list[int] = []
    parts.add_node()
    task = parts.submit()
    parts.dispatcher.on_ended[task.id].add(ended.append)
    assert ended == []
    with parts.ledger:
        parts.dispatcher.finish(task, 0)
    assert ended == [task.id]
    assert not parts.ledger.tasks


def test_a_waiting_call_that_is_cancelled_leaves_the_books_at_once(parts: Parts) -> None:
    cancelled: list[int] = []
    parts.dispatcher.on_cancelled.append(cancelled.append)
    agent = parts.add_node()
    sent, waiting = parts.submit(timeout_s=60.0), parts.submit(timeout_s=60.0)
    agent.received()
    with parts.ledger:
        for task in (waiting, sent, sent):
            parts.dispatcher.cancel(task.id)
    assert cancelled == [waiting.id, sent.id]
    assert list(parts.ledger.tasks) == [sent.id]
    (frame,) = agent.received()
    assert (frame.kind, frame.ident, frame.lane) == (FrameKind.CANCEL, sent.id, int(GRACE_S * 10))


def test_a_call_that_times_out_says_where_it_stood_and_fails(parts: Parts) -> None:
    agent = parts.add_node()
    task = parts.submit(timeout_s=0.001)
    with parts.ledger:
        while not parts.ledger.dirty:
            parts.ledger.run_deadlines()
    assert agent.kinds() == [FrameKind.FUNCTION, FrameKind.TASK, FrameKind.TAKE_STACK]
    stack = b'{"stack": "Stack (most recent call first):\\n  File \\"/home/me/run.py\\", line 7 in fit", "state": "S"}'
    with parts.ledger:
        parts.dispatcher.on_stack(task, Frame(FrameKind.STACK, 0, 0, task.id, stack))
    ((what, error),) = task.told
    assert what == "failed"
    assert isinstance(error, TaskTimeout)
    assert "run.py" in error.__notes__[0]
    assert agent.kinds() == [FrameKind.CANCEL]


@pytest.mark.parametrize(("is_taken_back", "error"), [(False, NodeLost), (True, Preempted)])
def test_a_task_that_cannot_run_fails_with_the_loss_of_its_node(
    parts: Parts, is_taken_back: bool, error: type[Exception]
) -> None:
    parts.add_node()
    task = parts.submit()
    with parts.ledger:
        if is_taken_back:
            parts.ledger.taken_back.add(0)
        parts.ledger.scheduler.drop(task.id)
        parts.dispatcher.perform([FailTask(task.id, 0, None)])
    ((_, raised),) = task.told
    assert type(raised) is error
    assert isinstance(raised, NodeLost | Preempted)
    assert (raised.node, raised.started) == (0, None)
    assert not parts.ledger.tasks


def test_a_task_behind_others_is_left_to_the_next_block(parts: Parts) -> None:
    agent = parts.add_node(slots=1)
    assert not parts.ledger.arrive(parts.task()), "nothing waits, so it may begin"
    first, second = parts.submit(), parts.submit()
    late = [parts.task(), parts.task()]
    assert all(parts.ledger.arrive(task) for task in late)
    assert list(parts.ledger.tasks) == [first.id, second.id]
    with parts.ledger:
        assert list(parts.ledger.tasks) == [first.id, second.id, *(task.id for task in late)]
        parts.dispatcher.finish(first, 0, elapsed_ns=1000)
    sent = [frame.ident for frame in agent.received() if frame.kind == FrameKind.TASK]
    assert sent == [first.id, second.id, *(task.id for task in late)]


def test_a_task_that_comes_while_a_block_sends_the_last_one_is_not_left_behind(parts: Parts) -> None:
    agent = parts.add_node(slots=1)
    first, _ = parts.submit(), parts.submit()
    late = parts.task()
    with parts.ledger:
        parts.dispatcher.finish(first, 0, elapsed_ns=1000)
        parts.ledger.arrivals.append(late)  # as another thread that saw the second one wait
    assert late.id in [frame.ident for frame in agent.received()]


def test_tasks_are_left_while_the_io_thread_is_behind_and_then_go_together(parts: Parts) -> None:
    agents = [parts.add_node(number, slots=4) for number in range(2)]
    parts.ledger.scheduler.submit(-1, expected_ns=1000)
    parts.ledger.scheduler.finished(-1, 1000)
    parts.ledger.is_behind = True
    late = [parts.task() for _ in range(5)]
    assert all(parts.ledger.arrive(task) for task in late), "the nodes are idle, but the I/O thread is about to come"
    assert not parts.ledger.tasks
    with parts.ledger:
        pass
    sent = [[frame.ident for frame in agent.received() if frame.kind == FrameKind.TASK] for agent in agents]
    numbers = [task.id for task in late]
    assert sorted(sent, key=len) == [numbers[4:], numbers[:4]]


def test_a_thread_that_leaves_too_many_tasks_takes_them_in_itself(parts: Parts) -> None:
    agent = parts.add_node(slots=2)
    parts.ledger.is_behind = True
    late = [parts.task() for _ in range(300)]
    assert all(parts.ledger.arrive(task) for task in late)
    assert [frame.ident for frame in agent.received() if frame.kind == FrameKind.TASK] == [late[0].id, late[1].id]
    assert late[255].id in parts.ledger.tasks


def test_a_task_that_is_left_as_the_io_thread_catches_up_is_taken_in(parts: Parts) -> None:
    agent = parts.add_node(slots=2)
    parts.ledger.is_behind = True
    late = parts.task()

    class Arrivals(deque[Task]):
        def append(self, task: Task) -> None:
            super().append(task)
            parts.ledger.is_behind = False  # as the I/O thread, whose block came too early for this task

    parts.ledger.arrivals = Arrivals()
    assert parts.ledger.arrive(late)
    assert [frame.ident for frame in agent.received() if frame.kind == FrameKind.TASK] == [late.id]


def test_a_task_that_was_left_fails_when_the_pool_is_closed(parts: Parts) -> None:
    parts.add_node(slots=1)
    parts.submit()
    parts.submit()
    early, late = parts.task(), parts.task()
    assert parts.ledger.arrive(early)
    with parts.ledger.lock:
        tasks, _ = parts.ledger.close_all()
    assert early in tasks
    assert not parts.ledger.arrive(late)
    parts.ledger.arrivals.append(late)  # as another thread that looked just before
    with parts.ledger:
        pass
    ((kind, error),) = late.told
    assert kind == "failed"
    assert isinstance(error, PoolClosed)
    assert not parts.ledger.tasks


def test_tasks_that_wait_for_the_node_beside_the_head_go_to_others_when_it_ends_nothing(parts: Parts) -> None:
    now = 0.0
    parts.ledger.now = lambda: now
    home, other = parts.add_node(0, slots=1), parts.add_node(1, slots=1)
    scheduler = parts.ledger.scheduler
    with parts.ledger:
        scheduler.set_home(0)
        parts.dispatcher.perform(scheduler.set_round_trip(1, 4e6))
    for _ in range(60):  # of 20 us
        task = parts.submit()
        with parts.ledger:
            parts.dispatcher.finish(task, scheduler.node_of(task.id) or 0, elapsed_ns=20_000)
    tasks = [parts.submit() for _ in range(3)]
    assert [scheduler.node_of(task.id) for task in tasks] == [0, 0, 0]
    home.received()
    for _ in range(2):
        now += LOOK_S
        with parts.ledger:
            parts.ledger.run_deadlines()
    assert [(frame.kind, frame.ident) for frame in home.received()] == [(FrameKind.RECALL, tasks[2].id)]
    with parts.ledger:
        parts.dispatcher.release(tasks[2], 0)
        parts.dispatcher.perform(scheduler.lost(tasks[2].id, started=False))
    assert other.received()[-1].ident == tasks[2].id
    assert not scheduler.needs_look


@pytest.mark.parametrize(("elapsed_ns", "nodes"), [(20_000, [0, 0]), (1_000_000_000, [0, 1]), (None, [0, 1])])
def test_a_function_goes_to_all_nodes_if_it_was_long_or_is_not_known(
    parts: Parts, elapsed_ns: int | None, nodes: list[int]
) -> None:
    parts.add_node(0, slots=1)
    parts.add_node(1, slots=1)
    scheduler = parts.ledger.scheduler
    with parts.ledger:
        scheduler.set_home(0)
        parts.dispatcher.perform(scheduler.set_round_trip(1, 4e6))
    if elapsed_ns is not None:
        task = parts.submit()
        with parts.ledger:
            parts.dispatcher.finish(task, scheduler.node_of(task.id) or 0, elapsed_ns=elapsed_ns)
    with parts.ledger:
        for number in range(1000, 1060):  # others are tiny
            scheduler.submit(number, nodes=(0,))
            scheduler.finished(number, 20_000)
    assert sorted(scheduler.node_of(task.id) or 0 for task in (parts.submit(), parts.submit())) == nodes
