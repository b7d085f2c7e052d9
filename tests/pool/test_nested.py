"""Calls from a running task: through the client to other nodes of the pool, and back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import skyward as sky
from skyward.errors import NodeLost, PoolClosed, SlotLost, TaskTimeout, UsageError
from skyward.integrations.base import IntegrationBase, integrate
from skyward.node.slot.runtime import current_rank
from skyward.testing import Faults
from skyward.values.topology import Rank
from tests.engines import engine_of
from tests.waiting import lines_of, until

pytestmark = pytest.mark.by_reference  # `Plain` is pickled again, within a task, by the name of its class


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=4, concurrency=1, roles={"evaluation": (3,)}, logs=False)


class Plain(IntegrationBase):
    """Integration whose gang is only processes."""

    name: ClassVar[str] = "plain-ranks"
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def session(self, rank: Rank) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def here() -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


@sky.compute
def node_of(_: object = None) -> int:
    return here()


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@sky.compute
def fail(message: str) -> None:
    raise LookupError(message)


@sky.compute
def total(data: Any) -> float:
    return float(data.sum())


def place() -> tuple[int, int, int]:
    rank = current_rank()
    assert rank is not None
    return rank.node, rank.rank, rank.world_size


ranks = sky.compute(integrate(place, Plain()))


@sky.compute
def ask(target: Any, number: int) -> int:
    return int(add(number, 1) >> target)


@sky.compute
def hold(began: Path, go: Path) -> int:
    with began.open("a") as file:
        file.write(f"{os.getpid()}\n")
    until(go.exists, within_s=60)
    return here()


class TestTargets:
    def test_a_part_of_a_pool_is_a_target_in_its_tasks(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def parent(one: Any, some: Any, role: Any, whole: Any) -> dict[str, Any]:
            async def awaited() -> Any:
                return await one.run_async(node_of())

            return {
                "here": here(),
                "value": node_of() >> one,
                "future": (node_of() > some).result(),
                "each": node_of() @ some,
                "group": (node_of() & node_of()) >> one,
                "joined": (sky.gather(node_of(), add(1, 2)) > one).result(),
                "as they come": list(sky.gather(node_of(), node_of(), stream=True) >> one),
                "role": node_of() >> role,
                "whole": [node_of() >> whole for _ in range(6)],
                "submit": one.submit(add(2, 3)).result(timeout=60),
                "async": asyncio.run(awaited()),
                "numbers": (one.node_numbers, some.node_numbers, role.node_numbers, whole.node_numbers),
            }

        told = parent(pool.node(1), pool.nodes([2, 1]), pool.role("evaluation"), pool) >> pool.node(0)
        assert told.pop("whole") != []
        assert told == {
            "here": 0,
            "value": 1,
            "future": told["future"],
            "each": [2, 1],
            "group": (1, 1),
            "joined": (1, 3),
            "as they come": [1, 1],
            "role": 3,
            "submit": 5,
            "async": 1,
            "numbers": ((1,), (2, 1), (3,), (0, 1, 2)),
        }
        assert told["future"] in (1, 2)

    def test_a_pool_may_be_captured(self, pool: sky.ComputePool) -> None:
        target = pool.node(2)
        assert sky.compute(lambda: node_of() >> target)() >> pool.node(1) == 2
        assert sky.compute(lambda: sorted(node_of() @ pool))() >> pool.role("evaluation") == [0, 1, 2]

    def test_a_broadcast_from_a_task_divides_data(self, pool: sky.ComputePool) -> None:
        part = sky.compute(lambda: sky.shard(list(range(5))))
        target = pool.nodes([2, 1])
        assert sky.compute(lambda: part() @ target)() >> pool.node(0) == [[0, 2, 4], [1, 3]]

    def test_a_task_may_send_a_gang(self, pool: sky.ComputePool) -> None:
        one, some = pool.node(3), pool.nodes([2, 1])

        def parent() -> Any:
            return ranks() >> one, ranks() @ some, ranks() >> some

        first, second, third = sky.compute(parent)() >> pool.node(0)
        assert (first, second) == ((3, 0, 1), [(2, 0, 2), (1, 1, 2)])
        assert third in ((1, 0, 1), (2, 0, 1))

    def test_a_rank_of_a_gang_may_call(self, pool: sky.ComputePool) -> None:
        role = pool.role("evaluation")

        def train() -> Any:
            rank = current_rank()
            assert rank is not None
            return [add(rank.rank, i) >> role for i in range(3)], node_of() >> role

        assert sky.compute(integrate(train, Plain()))() @ pool == [([r, r + 1, r + 2], 3) for r in range(3)]

    def test_calls_may_be_nested_in_each_other(self, pool: sky.ComputePool) -> None:
        inner, outer = pool.node(2), pool.node(1)
        assert sky.compute(lambda: ask(inner, 40) >> outer)() >> pool.node(0) == 41

    def test_threads_of_a_task_may_call(self, pool: sky.ComputePool) -> None:
        target = pool.nodes([1, 2])

        def parent() -> list[int]:
            with concurrent.futures.ThreadPoolExecutor(8) as threads:
                return list(threads.map(lambda i: add(i, i) >> target, range(64)))

        assert sky.compute(parent)() >> pool.node(0) == [2 * i for i in range(64)]

    def test_many_calls_at_once_work(self, pool: sky.ComputePool) -> None:
        target = pool.nodes([1, 2])

        def parent() -> list[int]:
            futures = [add(i, 1) > target for i in range(500)]
            return [future.result() for future in futures]

        assert sky.compute(parent)() >> pool.node(0) == list(range(1, 501))

    def test_a_map_may_call(self, pool: sky.ComputePool) -> None:
        role = pool.role("evaluation")

        def plus_one(i: int) -> int:
            return add(i, 1) >> role

        assert pool.map(plus_one, range(20)) == list(range(1, 21))

    def test_a_thread_slot_may_call(self) -> None:
        with sky.ComputePool(sky.Local(), nodes=2, concurrency=2, executor="thread", logs=False) as pool:
            target = pool.node(1)
            futures = [ask(target, i) > pool.node(0) for i in range(8)]
            assert [future.result(timeout=60) for future in futures] == list(range(1, 9))


class TestPayloads:
    @pytest.mark.parametrize("size", [10, 100_000, 8_000_000])
    def test_arrays_go_and_come_back(self, pool: sky.ComputePool, size: int) -> None:
        target = pool.node(1)

        @sky.compute
        def twice(parts: list[Any]) -> list[Any]:
            return [2 * part for part in parts]

        def parent() -> tuple[float, bool]:
            data = np.arange(size, dtype=np.float64)
            first, second = twice([data, np.ones(size)]) >> target
            return total(data) >> target, bool((first == 2 * data).all() and (second == 2).all())

        assert sky.compute(parent)() >> pool.node(0) == (float(np.arange(size, dtype=np.float64).sum()), True)

    def test_equal_arrays_in_many_calls_all_arrive(self, pool: sky.ComputePool) -> None:
        target = pool.nodes([1, 2])

        def parent() -> list[float]:
            data = np.ones(100_000)
            futures = [total(data if i % 2 else data.copy()) > target for i in range(20)]
            with concurrent.futures.ThreadPoolExecutor(4) as threads:
                more = list(threads.map(lambda _: total(data) >> target, range(8)))
            return [future.result() for future in futures] + more

        assert sky.compute(parent)() >> pool.node(0) == [100_000.0] * 28

    def test_a_large_function_and_many_small_arguments_arrive(self, pool: sky.ComputePool) -> None:
        target, table = pool.node(1), os.urandom(400_000)

        def parent() -> tuple[int, int]:
            @sky.compute
            def look(data: list[str]) -> tuple[int, int]:
                return len(table), len(data)

            return look([str(i) for i in range(60_000)]) >> target

        assert sky.compute(parent)() >> pool.node(0) == (400_000, 60_000)

    def test_objects_that_cannot_travel_are_named(self, pool: sky.ComputePool) -> None:
        target = pool.node(1)

        def parent() -> Any:
            return add(threading.Lock(), 1) >> target  # type: ignore[call-overload]

        with pytest.raises(sky.errors.ArgumentNotPicklable, match=r"an argument of add\(\) cannot be sent"):
            sky.compute(parent)() >> pool.node(0)


class TestFailures:
    def test_an_error_comes_back_unchanged(self, pool: sky.ComputePool) -> None:
        target = pool.node(1)

        def parent() -> str:
            try:
                fail("lost it") >> target
            except LookupError as error:
                return f"{error}: {''.join(error.__notes__)}"
            return "nothing"

        told = sky.compute(parent)() >> pool.node(0)
        assert told.startswith("lost it")
        assert "(node 1, task " in told
        with pytest.raises(LookupError, match="lost it"):
            sky.compute(lambda: fail("lost it") @ target)() >> pool.node(0)
        with pytest.raises(LookupError, match="lost it"):
            sky.compute(lambda: sky.compute(integrate(fail.fn, Plain()))("lost it") >> target)() >> pool.node(0)

    def test_the_death_of_a_slot_is_reported(self, pool: sky.ComputePool) -> None:
        target = pool.node(1)
        die = sky.compute(lambda: os._exit(3))

        def parent() -> tuple[str, int]:
            try:
                die() >> target
            except SlotLost as error:
                return type(error).__name__, add(1, 1) >> target
            return "", 0

        assert sky.compute(parent)() >> pool.node(0) == ("SlotLost", 2)

    def test_time_limits_and_retries_apply(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        target, seen = pool.node(1), tmp_path / "seen"

        @sky.compute(retries=2, retry_on=LookupError)
        def third_time() -> int:
            with seen.open("a") as file:
                file.write("x\n")
            if len(lines_of(seen)) < 3:
                raise LookupError("again")
            return len(lines_of(seen))

        assert sky.compute(lambda: third_time() >> target)() >> pool.node(0) == 3
        slow = sky.compute(time.sleep).with_timeout(0.2)
        with pytest.raises(TaskTimeout):
            sky.compute(lambda: slow(60) >> target)() >> pool.node(0)

    def test_streams_are_refused(self, pool: sky.ComputePool) -> None:
        target = pool.node(1)

        @sky.compute
        def count() -> Iterator[int]:
            yield 1

        @sky.compute
        def consume(items: Iterator[int]) -> int:
            return sum(items)

        with pytest.raises(UsageError, match="count: a generator function"):
            sky.compute(lambda: count() >> target)() >> pool.node(0)
        with pytest.raises(UsageError, match=r"consume: takes an iterator \(items\)"):
            sky.compute(lambda: consume(iter([1])) >> target)() >> pool.node(0)

    def test_the_loss_of_a_node_is_reported(self, tmp_path: Path) -> None:
        began, go = tmp_path / "began", tmp_path / "go"
        with sky.ComputePool(sky.Local(), nodes=2, logs=False) as pool:
            target = pool.node(1)

            def parent() -> tuple[str, int]:
                try:
                    hold(began, go) >> target
                except NodeLost:
                    return "lost", node_of() >> target
                return "", 0

            future = sky.compute(parent)() > pool.node(0)
            until(lambda: lines_of(began))
            Faults(pool).kill_node(1)
            assert future.result(timeout=60) == ("lost", 1)


class TestEnds:
    """The calls of a task end with it, however it ends."""

    def open_calls(self, pool: sky.ComputePool) -> int:
        engine = engine_of(pool)
        nested = engine.nested_calls
        # Leftovers of calls that have ended cost only memory.
        return len(engine.ledger.tasks) + len(engine.ledger.gangs) + len(nested._calls) + len(nested._by_parent)

    @pytest.mark.parametrize("how", ["returns", "raises", "dies", "is cancelled", "is late"])
    def test_calls_end_with_their_task(self, pool: sky.ComputePool, tmp_path: Path, how: str) -> None:
        target, began, never = pool.node(1), tmp_path / "began", tmp_path / "never"

        def parent() -> None:
            running, waiting = hold(began, never) > target, hold(began, never) > target
            until(lambda: lines_of(began))
            if how == "raises":
                raise ValueError("enough")
            if how == "dies":
                os._exit(1)
            if how != "returns":
                waiting.result()
            assert not running.done()

        call = sky.compute(parent)()
        future = (call.with_timeout(6) if how == "is late" else call) > pool.node(0)
        until(lambda: lines_of(began))
        if how == "is cancelled":
            future.cancel()
        else:
            concurrent.futures.wait([future], 30)
        until(lambda: not self.open_calls(pool))
        assert len(lines_of(began)) == 1, "the one that waited never began"
        assert add(1, 2) >> target == 3, "the slot is free"

    def test_a_cancelled_call_is_stopped(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        target, began, never = pool.node(1), tmp_path / "began", tmp_path / "never"

        def parent() -> int:
            future = hold(began, never) > target
            until(lambda: lines_of(began))
            assert future.cancel()
            return add(1, 2) >> target

        assert sky.compute(parent)() >> pool.node(0) == 3
        until(lambda: not self.open_calls(pool))

    def test_a_thread_slot_that_waits_is_cancelled(self, tmp_path: Path) -> None:
        began, never = tmp_path / "began", tmp_path / "never"
        with sky.ComputePool(sky.Local(), nodes=2, executor="thread", logs=False, cancel_grace_s=0.2) as pool:
            target = pool.node(1)
            future = sky.compute(lambda: hold(began, never) >> target)() > pool.node(0)
            until(lambda: lines_of(began))
            future.cancel()
            assert (add(1, 1) > pool.node(0)).result(timeout=60) == 2

    def test_a_pool_that_is_closed_ends_all(self, tmp_path: Path) -> None:
        began, never = tmp_path / "began", tmp_path / "never"
        pool = sky.ComputePool(sky.Local(), nodes=2, logs=False).start()
        target = pool.node(1)
        future = sky.compute(lambda: hold(began, never) >> target)() > pool.node(0)
        until(lambda: lines_of(began))
        pool.close(cancel=True)
        with pytest.raises(PoolClosed):
            future.result(timeout=60)


class TestCircles:
    """A call that could never start is refused."""

    def test_a_task_cannot_wait_for_its_own_slot(self, pool: sky.ComputePool) -> None:
        own = pool.node(0)
        with pytest.raises(UsageError, match=r"'add': could never run, because all its possible slots \(node 0\)"):
            ask(own, 1) >> own
        assert add(1, 1) >> own == 2

    def test_tasks_that_wait_for_each_other_fail(self, pool: sky.ComputePool) -> None:
        first, second = pool.node(0), pool.node(1)

        def back() -> int:
            return int(add(1, 1) >> first)

        def parent() -> str:
            try:
                return str(sky.compute(back)() >> second)
            except UsageError as error:
                return str(error)

        assert "could never run" in sky.compute(parent)() >> first

    def test_all_slots_of_a_pool_may_wait_for_a_kept_node_but_not_for_each_other(
        self, pool: sky.ComputePool, tmp_path: Path
    ) -> None:
        role = pool.role("evaluation")

        def told(target: Any, began: Path) -> str:
            with began.open("a") as file:
                file.write("began\n")
            until(lambda: len(lines_of(began)) == 3)
            try:
                return str(add(1, 1) >> target)
            except UsageError:
                return "refused"

        parent = sky.compute(told)
        assert parent(role, tmp_path / "first") @ pool == ["2", "2", "2"]
        answers = parent(pool, tmp_path / "second") @ pool
        assert sorted(answers) == ["2", "2", "refused"], "the one that would have closed the circle"

    def test_a_call_is_not_blocked_by_a_gang_that_waits_for_its_task(
        self, pool: sky.ComputePool, tmp_path: Path
    ) -> None:
        target, began, go = pool.node(1), tmp_path / "began", tmp_path / "go"

        def parent() -> int:
            hold.local(began, go)
            return int(add(2, 2) >> target)

        future = sky.compute(parent)() > pool.node(0)
        until(lambda: lines_of(began))
        held = [hold(tmp_path / "other", go) > target for _ in range(3)]
        gang = ranks() > pool
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            everywhere = thread.submit(lambda: ranks() @ pool)
            until(lambda: len(engine_of(pool).ledger.gangs) == 2)
            go.touch()
            assert future.result(timeout=60) == 4
            assert len(everywhere.result(timeout=60)) == 3
        gang.result(timeout=60)
        assert [call.result(timeout=60) for call in held] == [1, 1, 1]

    def test_a_gang_cannot_wait_for_places_that_it_holds(self, pool: sky.ComputePool) -> None:
        def train() -> str:
            try:
                return str(node_of() >> pool)
            except UsageError as error:
                return "refused" if "could never run" in str(error) else str(error)

        assert sky.compute(integrate(train, Plain()))() @ pool == ["refused"] * 3


class TestHandles:
    def test_a_handle_without_its_pool_is_refused(self) -> None:
        with sky.ComputePool(sky.Local(), logs=False) as pool:
            data = pickle.dumps([pool.node(0), pool])
            one, whole = pickle.loads(data)
            assert add(1, 2) >> one == add(1, 2) >> whole == 3, "in its own process it means the pool"
            assert (add(1, 2) @ one, (add(1, 2) > whole).result()) == ([3], 3)
            assert one == pickle.loads(data)[0]
        assert (one.total_slots, repr(one)) == (1, f"<node 0 of pool {pool.job_id}>")
        for handle in (one, whole):
            with pytest.raises(PoolClosed, match="its pool is not open here"):
                add(1, 2) >> handle

    def test_a_handle_of_another_pool_is_refused(self, pool: sky.ComputePool) -> None:
        with (
            sky.ComputePool(sky.Local(), logs=False) as other,
            pytest.raises(UsageError, match="belongs to another pool than this task"),
        ):
            ask(other.node(0), 1) >> pool.node(0)

    def test_control_refers_to_the_call_made_here(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        target, began, go = pool.node(1), tmp_path / "began", tmp_path / "go"
        future = sky.compute(lambda: hold(began, go) >> target)() > pool.node(0)
        until(lambda: lines_of(began))
        assert engine_of(pool).questions.call_named("") == getattr(future, "call_id", 0)
        go.touch()
        assert future.result(timeout=60) == 1
