"""Waiting tasks can be placed, and taken out of their queue in any order, without a search."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import deque
from types import FrameType

import pytest

from skyward.schedule.actions import Action, Send, StartGang
from skyward.schedule.resources import UNIT, Need, Supply
from skyward.schedule.scheduler import Scheduler

_MANY = 100_000


@pytest.mark.parametrize("order", ["oldest", "newest", "random"])
def test_a_hundred_thousand_waiting_tasks_are_cancelled_at_once_in_any_order(order: str) -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 1)
    for task in range(_MANY):
        scheduler.submit(task)
    waiting = list(range(1, _MANY))
    if order == "newest":
        waiting.reverse()
    elif order == "random":
        random.Random(5).shuffle(waiting)
    began = time.thread_time()
    for task in waiting:
        scheduler.cancel(task)
    assert time.thread_time() - began < 2.0  # a search in the queue for each of them takes minutes
    assert scheduler.queued == 0


def test_gangs_that_wait_behind_many_tasks_are_cancelled_at_once() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 1)
    for task in range(_MANY // 10):
        scheduler.submit(task)
    gangs = range(_MANY, _MANY + _MANY // 10)
    for gang in gangs:
        scheduler.submit_gang(gang, nodes=(0,), places=1)
    began = time.thread_time()
    for gang in gangs:
        scheduler.gang_finished(gang)
    assert time.thread_time() - began < 2.0
    assert scheduler.queued == _MANY // 10 - 1


def test_returned_tasks_go_in_front_of_tasks_submitted_later() -> None:
    scheduler = Scheduler()
    scheduler.node_up(0, 1)
    for task in range(4):
        scheduler.submit(task)
    assert scheduler.lost(0, started=False) == [Send(0, 0)]
    assert [scheduler.node_of(task) for task in range(4)] == [0, None, None, None]


def steps(nodes: int, tasks: int) -> float:
    """Return how many functions the scheduler calls for a task, while calls of five kinds wait."""
    scheduler = Scheduler()
    gpus = Supply(cpus=32, memory_gib=256, devices=("A100",) * 8)
    for node in range(nodes):
        scheduler.node_up(node, 8, gpus)
    needs = [
        Need(devices=UNIT),
        Need(devices=500, cpus=2 * UNIT),
        Need(cpus=2 * UNIT, devices=0),
        Need(devices=2 * UNIT),
    ]
    numbers = itertools.count()
    running: deque[int] = deque()

    def submit() -> list[Action]:
        number = next(numbers)
        if number % 100 == 50:
            pair = (number * 7919 % nodes, (number * 7919 + 1) % nodes)
            return scheduler.submit_gang(number, nodes=pair, places=1, need=needs[number % 4])
        return scheduler.submit(number, need=needs[number % 4], prefer=(number % nodes,) if number % 2 else ())

    def run(count: int) -> None:
        for _ in range(count):
            number = running.popleft()
            ended = scheduler.gang_finished(number) if number % 100 == 50 else scheduler.finished(number, 10_000_000)
            for action in ended + submit():
                running.append(action.gang if isinstance(action, StartGang) else action.task)  # type: ignore[union-attr]

    while scheduler.queued < 16 * nodes:
        running += [a.gang if isinstance(a, StartGang) else a.task for a in submit()]  # type: ignore[union-attr]
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run(tasks)
    finally:
        sys.setprofile(before)
    return calls / tasks


def test_a_task_takes_as_many_steps_among_a_thousand_nodes_as_among_ten() -> None:
    assert steps(1000, 2000) < 1.1 * steps(10, 2000) < 90
