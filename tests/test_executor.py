"""`pool.executor()` beyond what CPython's own tests check (tests/stdlib)."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from tests.waiting import until


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=1, concurrency=2, logs=False)


def test_a_running_call_cannot_be_cancelled(pool: sky.ComputePool, tmp_path: Path) -> None:
    def wait() -> int:
        (tmp_path / "began").touch()
        until((tmp_path / "go").exists)
        return 7

    with pool.executor() as executor:
        future = executor.submit(wait)
        until((tmp_path / "began").exists)
        assert future.running()
        assert not future.cancel()
        (tmp_path / "go").touch()
        assert future.result(timeout=20) == 7


def test_a_compute_function_keeps_its_options(pool: sky.ComputePool) -> None:
    with pool.executor() as executor, pytest.raises(sky.errors.TaskTimeout):
        executor.submit(sky.compute(timeout_s=0.2)(time.sleep), 60).result(timeout=20)


def test_map_in_chunks_keeps_order_and_raises_in_place(pool: sky.ComputePool) -> None:
    with pool.executor() as executor:
        assert list(executor.map(pow, range(20), [2] * 20, chunksize=7)) == [x * x for x in range(20)]
        values = executor.map(lambda x: 1 / x, [1, 2, 0, 4])
        assert [next(values), next(values)] == [1, 0.5]
        with pytest.raises(ZeroDivisionError):
            next(values)
        with pytest.raises(ValueError, match="chunksize must be >= 1"):
            executor.map(abs, [1], chunksize=0)


def test_shutdown_ends_the_executor_and_not_the_pool(pool: sky.ComputePool) -> None:
    executor = pool.executor()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(abs, 1)
    assert sky.compute(abs)(-1) >> pool == 1


def test_shutdown_cancels_what_is_queued_if_asked(pool: sky.ComputePool, tmp_path: Path) -> None:
    def wait(me: int) -> int:
        (tmp_path / f"began{me}").touch()
        until((tmp_path / "go").exists)
        return me

    executor = pool.executor()
    futures = [executor.submit(wait, i) for i in range(8)]
    until(lambda: len(list(tmp_path.glob("began*"))) == 2)
    executor.shutdown(wait=False, cancel_futures=True)
    (tmp_path / "go").touch()
    concurrent.futures.wait(futures, timeout=20)
    assert sum(not f.cancelled() for f in futures) <= 4
    assert all(f.cancelled() or f.result() == i for i, f in enumerate(futures))


def test_two_executors_of_a_pool_are_apart(pool: sky.ComputePool) -> None:
    with pool.executor() as first:
        pool.executor().shutdown()
        assert first.submit(abs, -3).result(timeout=20) == 3
