"""Shared state over sshd: links that are cut, and calls and nodes that die with a lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NodeLost, SlotLost
from tests.hosts.faults import EPSILON_S, Place, kill, nothing_runs_on
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

Places = Callable[[int], Place]


# In functions, so that they travel by value: this module is not on the nodes.


def counting() -> Any:
    def count(times: int) -> list[int]:
        return [sky.counter("count").increment() for _ in range(times)]

    return sky.compute(count)


def holding() -> Any:
    def hold() -> None:
        sky.lock("held").acquire()
        sky.event("is held").set()
        time.sleep(600)

    return sky.compute(hold)


def test_each_operation_is_applied_once_over_a_cut_link(place: Places) -> None:
    here = place(2)
    with here.pool(lease_s=30.0) as pool:
        tasks = [counting()(2000) > pool.node(node) for node in range(2)]
        until(lambda: pool.counter("count").value() > 100)
        with here.hosts[0].link_cut(), here.hosts[1].link_cut():
            time.sleep(5)
            own = [pool.counter("count").increment() for _ in range(100)]
        numbers = [number for task in tasks for number in task.result(120)]
        assert sorted([*numbers, *own]) == list(range(1, 4101))


@pytest.mark.parametrize("role", ["slot", "agent"])
def test_a_lock_is_free_when_its_call_or_node_dies(place: Places, role: Any) -> None:
    here = place(2)
    with here.pool() as pool:
        holder = holding()() > pool.node(0)
        pool.event("is held").wait(60)
        waiting = sky.compute(lambda: sky.lock("held").acquire(90))() > pool.node(1)
        with pytest.raises(TimeoutError):
            pool.lock("held").acquire(0.2)
        kill(here.hosts[0], role)
        with pytest.raises(SlotLost if role == "slot" else NodeLost):
            holder.result(60)
        assert waiting.result(100) > 1


def test_a_lock_behind_a_link_that_stays_cut_is_free_once_its_node_has_ended(place: Places) -> None:
    here = place(2)
    lease_s = 4.0
    with here.pool(lease_s=lease_s) as pool:
        holder = holding()() > pool.node(0)
        pool.event("is held").wait(60)
        with here.hosts[0].link_cut():
            with pytest.raises(TimeoutError):
                pool.lock("held").acquire(1.0)
            nothing_runs_on([here.hosts[0]], lease_s + EPSILON_S)
            assert pool.lock("held").acquire(60) > 1
            with pytest.raises(NodeLost):
                holder.result(60)
        pool.lock("held").release()
