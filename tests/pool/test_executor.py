"""`pool.executor()` beyond what CPython's own tests check (tests/stdlib)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import operator
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
        assert future.result(timeout=60) == 7


class Adder:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, x: int) -> int:
        return x + self.by

    @sky.compute
    def times(self, x: int) -> int:
        return x * self.by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Adder) and other.by == self.by

    __hash__ = None  # type: ignore[assignment]


def bound_method() -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a copy of its object is sent, which is fine here
        return Adder(3).times


CALLABLES: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    (functools.partial(pow, 2), (3,), 8),
    (functools.partial(functools.partial(pow), 2, exp=3), (), 8),
    (Adder(3), (4,), 7),
    (Adder, (3,), Adder(3)),
    (bound_method(), (4,), 12),
    (operator.itemgetter(0), ([7],), 7),
    (operator.attrgetter("real"), (3,), 3),
    (operator.methodcaller("upper"), ("a",), "A"),
    ("x".upper, (), "X"),
    ("-".join, (["a", "b"],), "a-b"),
    ([1].append, (2,), None),
    ({"a": 1}.get, ("b", 5), 5),
    (re.compile("a+").sub, ("-", "baab"), "b-b"),
    (str.upper, ("a",), "A"),
    (int, ("5",), 5),
    (max, (3, 4), 4),
    (lambda x: -x, (1,), -1),
]


@pytest.mark.parametrize(("function", "args", "value"), CALLABLES, ids=lambda part: repr(part)[:30])
def test_all_arguments_of_the_standard_executors_are_accepted(
    pool: sky.ComputePool, function: Callable[..., Any], args: tuple[Any, ...], value: object
) -> None:
    call = sky.compute(function)(*args)
    assert call >> pool == value
    assert pool.submit(function, *args).result(timeout=60) == value
    with pool.executor() as executor:
        assert executor.submit(function, *args).result(timeout=60) == value
        if args:
            assert list(executor.map(function, *[[arg, arg] for arg in args])) == [value, value]
    if args:
        assert pool.map(function, *[[arg] for arg in args]) == [value]
    assert repr(call).startswith(f"<{call.name}(")
    assert repr(call.fn).startswith("<compute ")


def test_asyncio_runs_partials_in_it(pool: sky.ComputePool) -> None:
    async def main() -> int:
        with pool.executor() as executor:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(executor, functools.partial(pow, 2, exp=5))

    assert asyncio.run(main()) == 32


def test_a_bound_method_of_a_builtin_is_sent_as_it_is_now(pool: sky.ComputePool) -> None:
    items = [1]
    copied = sky.compute(items.copy)
    assert copied() >> pool == [1]
    items.append(2)
    assert copied() >> pool == [1, 2]


def test_wrong_arguments_are_the_error_of_the_future(pool: sky.ComputePool) -> None:
    with pool.executor() as executor:
        future = executor.submit(lambda x: x)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            future.result(timeout=60)


def test_callable_objects_may_be_generators_and_partials_of_generators(pool: sky.ComputePool) -> None:
    class Counter:
        def __call__(self, limit: int) -> Iterator[int]:
            yield from range(limit)

    for function in (Counter(), functools.partial(Counter(), 3)):
        args = () if isinstance(function, functools.partial) else (3,)
        assert list(sky.compute(function)(*args) >> pool) == [0, 1, 2]


def test_a_compute_function_keeps_its_options(pool: sky.ComputePool) -> None:
    with pool.executor() as executor, pytest.raises(sky.errors.TaskTimeout):
        executor.submit(sky.compute(timeout_s=0.2)(time.sleep), 60).result(timeout=60)


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


def test_shutdown_cancels_queued_calls_on_request(pool: sky.ComputePool, tmp_path: Path) -> None:
    def wait(me: int) -> int:
        (tmp_path / f"began{me}").touch()
        until((tmp_path / "go").exists)
        return me

    executor = pool.executor()
    futures = [executor.submit(wait, i) for i in range(8)]
    until(lambda: len(list(tmp_path.glob("began*"))) == 2)
    executor.shutdown(wait=False, cancel_futures=True)
    (tmp_path / "go").touch()
    concurrent.futures.wait(futures, timeout=60)
    assert sum(not f.cancelled() for f in futures) <= 4
    assert all(f.cancelled() or f.result() == i for i, f in enumerate(futures))


def test_two_executors_of_a_pool_are_independent(pool: sky.ComputePool) -> None:
    with pool.executor() as first:
        pool.executor().shutdown()
        assert first.submit(abs, -3).result(timeout=60) == 3
