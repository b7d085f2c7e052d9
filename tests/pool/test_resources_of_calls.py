"""Resources of calls and gangs on any nodes, on real nodes of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from skyward.testing import Faults


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, console=False) as opened:
        yield opened


@sky.compute
def place(x: int = 0) -> tuple[int, int]:
    info = sky.instance_info()
    assert info is not None
    return info.node, x


@sky.compute
def hold(name: str) -> None:
    sky.queue[str](f"{name}-begun").put("")
    sky.queue[str](f"{name}-end").get()


def test_a_gang_runs_on_any_free_nodes_with_each_operator(pool: sky.ComputePool) -> None:
    values: list[object] = list(place(1) @ pool.any(2))
    assert values == [(0, 1), (1, 1)]
    values = list((place(2) > pool.any(2)).result())
    assert values == [(0, 2), (1, 2)]
    assert place.with_options(nodes=2)(3) >> pool == [(0, 3), (1, 3)]
    assert place(4).with_options(nodes=1) >> pool.nodes([1]) == [(1, 4)]


def test_a_map_runs_a_gang_for_each_item(pool: sky.ComputePool) -> None:
    values = pool.map(place.with_options(nodes=2), range(3))
    assert values == [[(0, x), (1, x)] for x in range(3)]
    failing = sky.compute(lambda x: 1 // x).with_options(nodes=2)
    with pytest.raises(ZeroDivisionError):
        pool.map(failing, [1, 0])
    ones, error = pool.map(failing, [1, 0], return_exceptions=True)
    assert ones == [1, 1]
    assert isinstance(error, ZeroDivisionError)


def test_a_task_may_call_any_nodes(pool: sky.ComputePool) -> None:
    @sky.compute
    def outer(target: sky.ComputePool) -> list[tuple[int, int]]:
        return place.with_options(nodes=2)(5) >> target

    assert outer(pool) >> pool == [(0, 5), (1, 5)]


def test_a_call_waits_for_booked_processors_and_says_so(pool: sky.ComputePool) -> None:
    node = pool.node(0)
    most = sky.compute(lambda: None).with_options(cpus=10_000)
    with pytest.raises(sky.errors.UsageError, match="no node can ever hold 10000 CPUs") as refused:
        pool.submit(most)
    cpus = int(str(refused.value).partition("no GPU, ")[2].partition(" CPU")[0])
    booked = hold.with_options(cpus=cpus)("booked") > node
    assert pool.queue("booked-begun").get() == ""
    waiting = place.with_options(cpus=0.5)(6) > node
    assert waiting.why_waiting == "waits for 0.5 CPUs: 0 free"
    assert booked.why_waiting == ""
    assert place(7) >> pool.node(1) == (1, 7), "others are not delayed"
    pool.queue("booked-end").put("")
    assert waiting.result() == (0, 6)
    assert waiting.why_waiting == ""
    booked.result()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpus": 0}, "cpus=0: must be a number of processors > 0"),
        ({"gpus": 1.5}, "gpus=1.5: must be 0, a share below 1, or a whole number"),
        ({"gpus": -1}, "gpus=-1: must be 0"),
        ({"memory_gib": "4"}, "memory_gib='4': must be a number of GiB > 0"),
        ({"nodes": 0}, "nodes=0: must be a whole number >= 1"),
        ({"accelerator": 3}, "accelerator=3: not an accelerator"),
        ({"num_gpus": 1}, "num_gpus: not an option of a call; write gpus=1"),
    ],
)
def test_illegal_resources_are_refused_where_they_are_written(options: dict[str, object], words: str) -> None:
    with pytest.raises(sky.errors.UsageError) as refused:
        place.with_options(**options)
    assert words in str(refused.value)


def test_too_many_nodes_are_refused_at_the_call(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.errors.UsageError, match="3 nodes with a slot each, but 2 can hold that"):
        pool.any(3).submit(place)
    with pytest.raises(sky.errors.UsageError, match="nodes=0: must be"):
        pool.any(0)
    with pytest.raises(sky.errors.UsageError, match="say it once"):
        place.with_options(nodes=1)() >> pool.any(2)


@sky.compute
def hold_until_killed(fault: str) -> None:
    sky.queue[int](fault).put(os.getpid())
    sky.event("never").wait()


@pytest.mark.parametrize("fault", ["slot", "gang", "agent"])
def test_bookings_of_calls_that_die_come_back(pool: sky.ComputePool, fault: str) -> None:
    with pytest.raises(sky.errors.UsageError) as refused:
        place.with_options(cpus=10_000)() >> pool
    cpus = int(str(refused.value).partition("no GPU, ")[2].partition(" CPU")[0])
    dying = hold_until_killed.with_options(cpus=cpus)(fault)
    held: sky.Future[Any] = dying > (pool.any(2) if fault == "gang" else pool.node(1))
    pid = pool.queue(fault).get()
    after = place.with_options(cpus=cpus)(8) > pool.node(1)
    assert after.why_waiting.endswith(": 0 free")
    if fault == "agent":
        Faults(pool).kill_node(1)
    else:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(sky.errors.SkywardError):
        held.result()
    assert after.result() == (1, 8)
