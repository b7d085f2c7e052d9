"""Waiting tasks can be taken out of their queue in any order, without a search."""

from __future__ import annotations

import random
import time

import pytest

from skyward.schedule.actions import Send
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
