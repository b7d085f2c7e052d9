"""Leases of calls and barriers between them, however a call ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import SkywardError, UsageError
from skyward.integrations.base import integrate
from skyward.testing import Faults
from tests.pools_with_gpus import Plain
from tests.waiting import until, until_text

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=2, logs=False, cancel_grace_s=0.5)


def hold(name: str, began: Path, how: str) -> int:
    """Take a lock and end without releasing it."""
    fence = sky.lock(name).acquire(LIMIT_S)
    began.write_text(str(os.getpid()))
    if how == "raise":
        raise KeyError(name)
    if how == "exit":
        os._exit(3)
    if how != "return":
        time.sleep(LIMIT_S)
    return fence


# Leases ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["return", "raise", "exit", "cancel", "kill"])
def test_a_lock_is_free_when_its_holder_ends(pool: sky.ComputePool, tmp_path: Path, how: str) -> None:
    future = sky.compute(hold)(how, tmp_path / "held", how) > pool
    until((tmp_path / "held").exists)
    if how == "kill":
        os.kill(int(until_text(tmp_path / "held")), signal.SIGKILL)
    if how == "cancel":
        future.cancel()
    elif how == "return":
        first = future.result(LIMIT_S)
        assert pool.lock(how).acquire(0) > first  # free before its value is here, with a larger number
        pool.lock(how).release()
        return
    else:
        with pytest.raises((KeyError, SkywardError)):
            future.result(LIMIT_S)
    with pool.lock(how):
        assert sky.compute(lambda: sky.lock("other").acquire(0))() >> pool > 0


def test_locks_and_permits_are_free_when_their_node_dies(tmp_path: Path) -> None:
    def hold_both(marker: Path) -> None:
        sky.semaphore("node", 2).acquire(LIMIT_S)
        sky.semaphore("node", 2).acquire(LIMIT_S)
        hold("node", marker, "wait")

    with sky.ComputePool(sky.Local(), nodes=2, logs=False, cancel_grace_s=0.3) as pool:
        future = sky.compute(hold_both)(tmp_path / "held") > pool.node(1)
        until((tmp_path / "held").exists)
        assert pool.semaphore("node", 2).available() == 0
        Faults(pool).kill_node(1)
        pool.semaphore("node", 2).acquire(LIMIT_S)
        assert pool.lock("node").acquire(LIMIT_S) > 0
        with pytest.raises(SkywardError):
            future.result(LIMIT_S)


def test_each_call_of_a_map_frees_what_it_holds(pool: sky.ComputePool) -> None:
    fences = pool.map(lambda _: sky.lock("map").acquire(LIMIT_S), range(40))
    assert len(set(fences)) == 40


def test_locks_exclude_and_fencing_numbers_grow(pool: sky.ComputePool) -> None:
    def work(_: int) -> list[int]:
        fences = []
        for _ in range(10):
            with sky.lock("exclusive") as fence:
                inside = sky.counter("inside")
                assert inside.increment() == 1
                inside.decrement()
                fences.append(fence)
        return fences

    fences = pool.map(work, range(4))
    assert all(mine == sorted(mine) for mine in fences)
    assert len({fence for mine in fences for fence in mine}) == 40


def test_only_the_holder_releases(pool: sky.ComputePool) -> None:
    def release() -> None:
        sky.lock("foreign").release()

    with pool.lock("foreign"), pytest.raises(UsageError, match="lock='foreign': this call does not hold it"):
        sky.compute(release)() >> pool


def test_a_nested_call_has_leases_of_its_own(pool: sky.ComputePool) -> None:
    def inner() -> int:
        return sky.lock("inner").acquire(LIMIT_S)  # not released

    def outer() -> list[int]:
        with sky.lock("outer") as fence:
            return [fence, *((sky.compute(inner)() >> pool) for _ in range(2)), sky.lock("inner").acquire(0)]

    fences = sky.compute(outer)() >> pool
    assert fences == sorted(set(fences))


def test_ranks_of_a_gang_are_calls_of_their_own(pool: sky.ComputePool) -> None:
    def rank() -> tuple[int, int]:
        place = sky.barrier("gang", 2).wait(LIMIT_S)
        return place, sky.lock("gang").acquire(LIMIT_S)  # not released: the other rank gets it when this one ends

    (first, one), (second, two) = sky.compute(integrate(rank, Plain()))() @ pool
    assert {first, second} == {0, 1}
    assert one != two


# Barriers -------------------------------------------------------------------------------------------------------------


def test_a_barrier_lets_all_go_together_again_and_again(pool: sky.ComputePool) -> None:
    def meet() -> list[int]:
        return [sky.barrier("rounds", 2).wait(LIMIT_S) for _ in range(5)]

    first, second = sky.compute(meet)() @ pool
    assert [sorted(pair) for pair in zip(first, second, strict=True)] == [[0, 1]] * 5


@pytest.mark.parametrize("how", ["kill", "raise", "timeout", "abort"])
def test_a_barrier_breaks_when_a_party_dies(pool: sky.ComputePool, tmp_path: Path, how: str) -> None:
    """Also when that party was not waiting at that moment."""

    def party(number: int) -> str:
        barrier = sky.barrier(how, 2)
        barrier.wait(LIMIT_S)
        try:
            if number == 1:
                barrier.wait()
            (tmp_path / "met").touch()
            until_waiting = time.monotonic() + LIMIT_S
            while not barrier.waiting() and time.monotonic() < until_waiting:
                time.sleep(0.01)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "abort":
                barrier.abort()
            if how == "timeout":
                sky.barrier(how, 2).reset()
            if how == "raise":
                raise KeyError(how)
        except threading.BrokenBarrierError as error:
            return str(error)
        return ""

    waiting, dying = (sky.compute(party)(number) > pool.node(number - 1) for number in (1, 2))
    assert "is broken, because" in waiting.result(LIMIT_S)
    if how in ("kill", "raise"):
        with pytest.raises((KeyError, SkywardError)):
            dying.result(LIMIT_S)
        with pytest.raises(threading.BrokenBarrierError):
            pool.barrier(how, 2).wait(0)
        assert pool.barrier(how, 2).is_broken()
    dying.exception(LIMIT_S)
    pool.barrier(how, 2).reset()
    assert not pool.barrier(how, 3).is_broken()  # a new one


def test_threads_as_slots_have_leases_of_their_own() -> None:
    def hold_until_told() -> None:
        sky.lock("threads").acquire(LIMIT_S)
        sky.event("holds").set()
        sky.event("end").wait(LIMIT_S)

    def contend() -> int:
        sky.event("contends").set()
        return sky.lock("threads").acquire(LIMIT_S)

    with sky.ComputePool(sky.Local(), concurrency=3, executor="thread", logs=False, cancel_grace_s=0.3) as pool:
        holder = sky.compute(hold_until_told)() > pool
        pool.event("holds").wait(LIMIT_S)
        contender = sky.compute(contend)() > pool
        pool.event("contends").wait(LIMIT_S)
        with pytest.raises(TimeoutError):
            pool.lock("threads").acquire(0.1)
        pool.event("end").set()
        assert contender.result(LIMIT_S) > 0
        holder.result(LIMIT_S)
        endless = sky.compute(lambda: sky.event("never").wait())() > pool
        until(endless.running)
        endless.cancel()  # the wait notices it between two looks at the link


def test_a_forked_child_keeps_no_lease_of_a_killed_call(pool: sky.ComputePool, tmp_path: Path) -> None:
    def fork(marker: Path) -> None:
        sky.lock("forked").acquire(LIMIT_S)
        if os.fork() == 0:
            time.sleep(LIMIT_S)
            os._exit(0)
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    future = sky.compute(fork)(tmp_path / "forked") > pool
    with pytest.raises(SkywardError):
        future.result(LIMIT_S)
    assert (tmp_path / "forked").exists()
    assert pool.lock("forked").acquire(LIMIT_S) > 0
    pool.lock("forked").release()
