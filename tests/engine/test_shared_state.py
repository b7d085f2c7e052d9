"""Shared state over real pools: links that break, calls that end in every way, and waits that end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import ArgumentNotPicklable, PoolClosed, UsageError
from tests.channels import Relayed
from tests.engines import engine_of
from tests.waiting import until

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=2, logs=False, cancel_grace_s=0.5)


# Values ---------------------------------------------------------------------------------------------------------------


def test_the_program_and_tasks_see_one_dictionary(pool: sky.ComputePool) -> None:
    def fill(node: int) -> None:
        shared = sky.dict[str, Any]("one")
        shared[f"node {node}"] = {"by": node}
        shared["nothing"] = None

    assert sky.compute(fill)(0) >> pool.node(0) is None
    assert sky.compute(fill)(1) >> pool.node(1) is None
    here = pool.dict("one")
    assert sorted(here) == ["node 0", "node 1", "nothing"]
    assert dict(here.items()) == {"node 0": {"by": 0}, "node 1": {"by": 1}, "nothing": None}
    assert here["nothing"] is None  # None is a value
    assert here.get("nothing", "default") is None
    assert "nothing" in here
    with pytest.raises(KeyError, match="missing"):
        here["missing"]
    assert here.pop("nothing") is None
    with pytest.raises(KeyError):
        here.pop("nothing")
    assert here.pop("nothing", 1) == 1
    assert len(here) == 2
    del here["node 0"]
    with pytest.raises(KeyError):
        del here["node 0"]
    assert here.values() == [{"by": 1}]
    here.clear()
    assert not here


def test_a_value_is_compared_as_python_compares(pool: sky.ComputePool) -> None:
    shared = pool.dict("compared")
    shared["set"] = {"a", "b", "c"}
    assert not shared.compare_and_set("missing", None, 1)
    assert not shared.compare_and_set("set", {"a"}, 1)
    assert shared.compare_and_set("set", {"c", "b", "a"}, {"d"})
    shared["whole"] = 1
    assert shared.compare_and_set("whole", 1.0, 2)  # other bytes, and equal
    assert shared.change("whole", lambda value: value + 1) == 3
    assert shared.change("new", lambda value: [*value, 1], default=[]) == [1]
    with pytest.raises(KeyError):
        shared.change("missing", lambda value: value)
    assert shared.setdefault("new", []) == [1]
    shared.update({"a": 1, ("b", 2): 2})
    assert shared[("b", 2)] == 2


def test_lists_and_sets(pool: sky.ComputePool) -> None:
    values = pool.list("values")
    values.append(None)
    values.extend([1, 2, 3])
    values.insert(1, "one")
    values[-1] = "last"
    assert list(values) == [None, "one", 1, 2, "last"]
    assert values[1:3] == ["one", 1]
    assert values[::-2] == ["last", 1, None]
    assert (values.pop(), values.pop(0), len(values)) == ("last", None, 3)
    for wrong in (lambda: values[3], lambda: values.pop(-4), lambda: values.set(7, 1)):
        with pytest.raises(IndexError, match="is out of range; there are 3 values"):
            wrong()
    members = pool.set("members")
    assert members.update(["a", None, ("b", 1)]) == 3
    assert not members.add("a")
    assert members.discard(None)
    assert members.members() == set(members) == {"a", ("b", 1)}
    assert ("b", 1) in members


def test_objects_of_the_users_classes_travel_by_value(pool: sky.ComputePool) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    def double(name: str) -> None:
        point = sky.dict[str, Any](name)["point"]
        point.x *= 2
        sky.dict[str, Any](name)["point"] = point

    pool.dict("classes")["point"] = Point(4)
    sky.compute(double)("classes") >> pool
    assert pool.dict("classes")["point"].x == 8
    with pytest.raises(ArgumentNotPicklable, match="cannot be sent"):
        pool.dict("classes")["lock"] = threading.Lock()


def test_an_object_is_an_argument_and_a_value(pool: sky.ComputePool) -> None:
    hits, limit = pool.counter("passed"), pool.semaphore("passed", 3)

    def hit(counter: sky.counter) -> sky.counter:
        with limit:
            counter.increment()
        return counter

    returned = sky.compute(hit)(hits) >> pool
    assert returned == hits
    assert returned.value() == 1
    assert "counter 'passed'" in repr(returned)


# Atomic ---------------------------------------------------------------------------------------------------------------


def test_counts_of_all_tasks_and_threads_are_whole(pool: sky.ComputePool) -> None:
    def count(_: int) -> list[int]:
        counter = sky.counter("whole")
        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(lambda _: counter.increment(), range(30)))

    numbers = [number for call in pool.map(count, range(8)) for number in call]
    assert sorted(numbers) == list(range(1, 241))  # each number was returned once: there is one order
    assert pool.counter("whole").reset() == 240
    assert pool.counter("whole").value() == int(pool.counter("whole")) == 0
    assert pool.counter("whole").decrement(3) == -3
    assert pool.counter("whole").compare_and_set(-3, 5)
    assert not pool.counter("whole").compare_and_set(-3, 6)


def test_a_reset_loses_no_count_and_a_pop_gives_each_value_once(pool: sky.ComputePool) -> None:
    def work(node: int) -> tuple[int, list[int]]:
        counter, left = sky.counter("reset"), sky.dict[int, int]("left")
        taken, popped = 0, []
        for number in range(40):
            counter.increment()
            taken += counter.reset()
            if left.pop(number, -1) >= 0:
                popped.append(number)
        return taken, popped

    pool.dict("left").update({number: number for number in range(40)})
    results = [future.result(LIMIT_S) for future in [sky.compute(work)(n) > pool for n in range(4)]]
    assert sum(taken for taken, _ in results) + pool.counter("reset").value() == 160
    assert sorted(number for _, popped in results for number in popped) == list(range(40))


def test_change_and_compare_and_set_lose_no_update(pool: sky.ComputePool) -> None:
    def change(_: int) -> None:
        shared = sky.dict[str, Any]("updates")
        for _ in range(10):
            shared.change("sum", lambda value: value + 1, default=0)
            while True:
                present = shared["list"]
                if shared.compare_and_set("list", present, [*present, 1]):
                    break

    pool.dict("updates")["list"] = []
    pool.map(change, range(4))
    assert pool.dict("updates")["sum"] == 40
    assert pool.dict("updates")["list"] == [1] * 40


def test_each_value_of_a_queue_is_taken_once_and_in_order(pool: sky.ComputePool) -> None:
    def consume(_: int) -> list[int]:
        taken = []
        while (item := sky.queue[int | None]("work", 4).get(LIMIT_S)) is not None:
            taken.append(item)
        return taken

    work = pool.queue("work", 4)
    calls = [sky.compute(consume)(n) > pool for n in range(3)]
    for number in range(60):
        work.put(number, LIMIT_S)
    for _ in calls:
        work.put(None, LIMIT_S)  # None is a value
    taken = [call.result(LIMIT_S) for call in calls]
    assert Counter(number for numbers in taken for number in numbers) == Counter(range(60))
    assert all(numbers == sorted(numbers) for numbers in taken)


# Waits ----------------------------------------------------------------------------------------------------------------


def test_a_wait_without_a_limit_has_none_and_costs_nothing(pool: sky.ComputePool, tmp_path: Path) -> None:
    def wait() -> tuple[float, float]:
        began, used = time.monotonic(), time.process_time()
        (tmp_path / "waits").touch()
        sky.event("long").wait()
        return time.monotonic() - began, time.process_time() - used

    future = sky.compute(wait)() > pool
    until((tmp_path / "waits").exists)
    time.sleep(2.5)  # longer than each limit inside
    pool.event("long").set()
    waited_s, used_s = future.result(LIMIT_S)
    assert waited_s > 2.4
    assert used_s < 1.0  # nobody asked again and again


def test_a_wait_obeys_its_timeout_and_has_then_not_happened(pool: sky.ComputePool) -> None:
    def waits(limit_s: float) -> list[str]:
        texts = []
        for wait in (
            lambda: sky.queue[int]("empty").get(limit_s),
            lambda: sky.queue[int]("full", 1).put(2, limit_s),
            lambda: sky.lock("taken").acquire(limit_s),
            lambda: sky.event("unset").wait(limit_s),
            lambda: sky.barrier(f"alone {limit_s}", 2).wait(limit_s),
        ):
            began = time.monotonic()
            try:
                wait()
            except TimeoutError as error:
                texts.append(str(error))
            assert time.monotonic() - began >= limit_s
        return texts

    pool.queue("full", 1).put(1)
    with pool.lock("taken"):
        for limit_s in (0, 0.1):
            texts = sky.compute(waits)(limit_s) >> pool
            assert len(texts) == 5
            assert texts[0].startswith(f"queue='empty': get could not be done within {limit_s:g} s; pass a larger")
            assert pool.barrier(f"alone {limit_s}", 2).is_broken()
    assert pool.queue("full", 1).get() == 1
    assert len(pool.queue("full", 1)) == 0
    pool.queue("empty").put(None)
    assert pool.queue("empty").get(0) is None
    assert not pool.lock("taken").is_locked()


def test_the_program_waits_too(pool: sky.ComputePool) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        pool.queue("here").get(timeout_s=0.05)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.queue("here").get, LIMIT_S)
        pool.queue("here").put("found")
        assert waiting.result(LIMIT_S) == "found"
    with pool.lock("here") as fence:
        assert pool.lock("here").is_current(fence)
        with pytest.raises(TimeoutError):
            pool.lock("here").acquire(0)
    assert not pool.lock("here").is_current(fence)


def test_a_cancelled_wait_leaves_nothing_behind(pool: sky.ComputePool, tmp_path: Path) -> None:
    def take(marker: Path) -> Any:
        marker.touch()
        return sky.queue[int]("cancelled").get()

    future = sky.compute(take)(tmp_path / "waits") > pool
    until((tmp_path / "waits").exists)
    assert future.cancel()
    until(lambda: engine_of(pool).counts().busy == 0)
    pool.queue("cancelled").put(7)
    assert pool.queue("cancelled").get(0) == 7  # the cancelled reader has not taken it


def test_async_twins(pool: sky.ComputePool) -> None:
    def count(tasks: int) -> tuple[int, list[int], str]:
        async def one(number: int) -> int:
            async with sky.lock("async") as fence:
                shared = sky.dict[str, int]("async")
                before = await shared.get.aio("n", 0)
                await asyncio.sleep(0)
                await shared.set.aio("n", (before or 0) + 1)
                return fence

        async def all_of_them() -> tuple[int, list[int], str]:
            fences = await asyncio.gather(*map(one, range(tasks)))
            waiting = asyncio.create_task(sky.queue[int]("async").get.aio())
            await asyncio.sleep(0.05)
            waiting.cancel()  # a cancelled wait takes nothing
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await sky.queue[int]("async").put.aio(5)
            assert await sky.queue[int]("async").get.aio(timeout_s=LIMIT_S) == 5
            try:
                await sky.event("async").wait.aio(timeout_s=0.05)
            except TimeoutError as error:
                return await sky.dict[str, int]("async").pop.aio("n"), fences, str(error)
            return 0, [], ""

        return asyncio.run(all_of_them())

    total, fences, text = sky.compute(count)(30) >> pool  # more waits than an executor of threads would have
    assert total == len(set(fences)) == 30
    assert "event='async'" in text

    async def here() -> tuple[Any, ...]:
        queue = pool.queue("here-async")
        waiting = asyncio.create_task(queue.get.aio())
        await asyncio.sleep(0)
        await queue.put.aio(1)
        with pytest.raises(TimeoutError):
            await queue.get.aio(timeout_s=0.01)
        return await waiting, await pool.counter("here-async").increment.aio()

    assert asyncio.run(here()) == (1, 1)


# Links that break -----------------------------------------------------------------------------------------------------


def reached(counter: sky.counter, mark: int) -> bool:
    return counter.value() >= mark


def test_each_operation_is_applied_once_over_links_that_break(tmp_path: Path) -> None:
    def count(times: int) -> list[int]:
        counter, log = sky.counter("far"), sky.list[int]("far")
        numbers = []
        for number in range(times):
            numbers.append(counter.increment())
            log.append(number)
            with sky.lock("far"):
                sky.queue[bytes]("far").put(bytes(1000 * number))
        return numbers

    provider = Relayed(folder=str(tmp_path / "relays"))
    with sky.ComputePool(provider, logs=False) as pool:
        future = sky.compute(count)(150) > pool
        for mark in range(15, 150, 15):
            until(partial(reached, pool.counter("far"), mark), LIMIT_S)
            provider.break_links(0)
        numbers = future.result(LIMIT_S)
        assert numbers == list(range(1, 151))
        assert list(pool.list("far")) == list(range(150))
        assert [len(pool.queue("far").get(0)) for _ in range(150)] == [1000 * number for number in range(150)]


def test_an_operation_is_one_round_trip(tmp_path: Path) -> None:
    delay_s = 0.2

    def operation() -> float:
        """Return how long one takes: the best of several, because a busy machine adds to all of them."""
        counter, shared = sky.counter("trip"), sky.dict[str, int]("trip")
        shared["n"] = 1
        shortest = float("inf")
        for number in range(1, 20):
            began = time.monotonic()
            counter.increment()
            assert shared.compare_and_set("n", number, number + 1)
            shortest = min(shortest, (time.monotonic() - began) / 2)
            if shortest < 4 * delay_s:
                break
        return shortest

    with sky.ComputePool(Relayed(folder=str(tmp_path / "relays"), delay_s=delay_s), logs=False) as pool:
        assert 2 * delay_s <= sky.compute(operation)() >> pool < 4 * delay_s


def test_a_wait_behind_a_cut_link_ends_in_time_and_is_undone(tmp_path: Path) -> None:
    def wait(marker: Path) -> float:
        sky.counter("cut").increment()
        marker.touch()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            sky.queue[int]("cut").get(timeout_s=1.5)
        ended = time.monotonic() - began
        sky.counter("cut").increment()
        return ended

    provider = Relayed(folder=str(tmp_path / "relays"))
    with sky.ComputePool(provider, logs=False) as pool:
        future = sky.compute(wait)(tmp_path / "waits") > pool
        until((tmp_path / "waits").exists)
        time.sleep(0.3)
        provider.cut()
        pool.queue("cut").put(1)  # granted, but the answer does not arrive
        time.sleep(3.5)
        provider.mend()
        assert 1.5 <= future.result(LIMIT_S) < LIMIT_S / 2
        assert pool.queue("cut").get(LIMIT_S) == 1  # the value that nobody received is back


# Names and mistakes ---------------------------------------------------------------------------------------------------


def test_a_name_that_nobody_uses_is_forgotten(pool: sky.ComputePool) -> None:
    queue = pool.queue("reused", 2)
    queue.put(1)
    with pytest.raises(UsageError, match=r"queue='reused': is in use with 2, not 3; pass the same number everywhere"):
        pool.queue("reused", 3).put(1)
    queue.clear()
    pool.queue("reused", 3).put(1)
    pool.queue("reused", 3).get()
    for _ in range(2):  # a barrier and a lock of earlier tasks are new for later ones
        sky.compute(lambda: sky.barrier("reused", 1).wait())() >> pool
        sky.compute(lambda: sky.barrier("reused", 2))() >> pool
        sky.compute(lambda: sky.lock("reused").acquire(0))() >> pool


def test_wrong_uses_are_refused_in_words(pool: sky.ComputePool) -> None:
    with pytest.raises(UsageError, match=r"name='x': sky.dict\(name\) is for tasks.*pool.dict\(name\)"):
        sky.dict("x")
    for name in ("", "x" * 201, 5):
        with pytest.raises(UsageError, match="is not the name of a lock; pass 1 to 200 characters"):
            pool.lock(name)  # type: ignore[arg-type]
    for key in ([1], {"a"}, object(), (1, [2])):
        with pytest.raises(UsageError, match="must be str, bytes, int, float, bool, None or a tuple of these"):
            pool.dict("keys")[key] = 1
    for wrong in (-1, "1", float("nan"), float("inf")):
        with pytest.raises(UsageError, match="timeout_s=.*must be a number >= 0, or None"):
            pool.event("e").wait(wrong)  # type: ignore[arg-type]
    for make in (lambda: pool.semaphore("s", 0), lambda: pool.barrier("b", -2), lambda: pool.queue("q", -1)):
        with pytest.raises(UsageError, match="must be a whole number >="):
            make()
    with pytest.raises(TypeError, match="timeout=5: not an option here; write timeout_s=5"):
        pool.queue("x").get(timeout=5)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="amount='1': must be a whole number"):
        pool.counter("c").increment("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="consistency"):
        pool.dict("x", consistency="strong")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"of \d+ bytes exceeds the limit"):
        sky.compute(lambda: sky.list[bytes]("large").append(bytes(65 << 20)))() >> pool
    sky.compute(lambda: sky.list[bytes]("large").append(bytes(5 << 20)))() >> pool  # several frames
    assert sky.compute(lambda: len(sky.list[bytes]("large")[0]))() >> pool == 5 << 20
    pool.list("large").clear()


def test_a_closed_pool_says_so_and_ends_the_waits() -> None:
    pool = sky.ComputePool(sky.Local(), logs=False)
    with pytest.raises(PoolClosed):
        pool.dict("x")
    with pool, ThreadPoolExecutor(1) as threads:
        queue = pool.queue("q")
        waiting = threads.submit(queue.get)
        until(waiting.running)
        time.sleep(0.1)
        pool.close()
        with pytest.raises(PoolClosed):
            waiting.result(LIMIT_S)
        with pytest.raises(PoolClosed, match="its pool is not open here"):
            queue.get(0)
