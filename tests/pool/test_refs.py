"""Values that stay on nodes: references, where their bytes lie, how they are freed, and what happens in faults."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import PoolClosed, RefLost, UsageError
from skyward.testing import Faults
from tests.kept import LENGTH, blobs, first, node, numbers
from tests.waiting import until


@sky.compute
def kinds(value: Any) -> list[str]:
    return [type(item).__name__ for item in (value.values() if isinstance(value, dict) else value)]


@sky.compute
def total(refs: list[sky.Ref[Any]]) -> float:
    return sum(float(ref.get()[0]) for ref in refs)


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, logs=False) as pool:
        yield pool


def test_a_kept_value_stays_on_its_node_and_arrives_as_an_argument(pool: sky.ComputePool) -> None:
    ref = numbers(3).keep() >> pool.node(1)
    assert isinstance(ref, sky.Ref)
    assert ref.nodes == (1,)
    assert LENGTH * 8 <= ref.nbytes < LENGTH * 8 + 1000
    assert first(ref) >> pool == (3.0, 1)  # goes to the bytes
    assert (ref.get() == np.arange(3, 3 + LENGTH)).all()


def test_other_nodes_get_the_bytes_on_the_way(pool: sky.ComputePool) -> None:
    ref = numbers(5).keep() >> pool.node(0)
    assert first(ref) >> pool.node(1) == (5.0, 1)
    assert ref.nodes == (0, 1)
    assert first(numbers(6).keep() >> pool.node(1)) @ pool == [(6.0, 0), (6.0, 1)]


def test_a_broadcast_keeps_a_value_on_each_node(pool: sky.ComputePool) -> None:
    @sky.compute
    def mine() -> Any:
        return np.full(LENGTH, float(node()))

    refs = mine().keep() @ pool
    assert [first(ref) >> pool for ref in refs] == [(0.0, 0), (1.0, 1)]


def test_a_reference_arrives_as_itself_in_a_container(pool: sky.ComputePool) -> None:
    ref = numbers(1).keep() >> pool
    small = pool.put(4)
    assert kinds([ref, small]) >> pool == ["Ref", "Ref"]
    assert kinds({"a": ref}) >> pool == ["Ref"]
    assert total([ref, numbers(2).keep() >> pool]) @ pool == [3.0, 3.0]


def test_one_reference_as_two_arguments_is_one_object(pool: sky.ComputePool) -> None:
    ref = pool.put(np.ones(LENGTH))
    assert sky.compute(lambda a, *, b: a is b)(ref, b=ref) >> pool


def test_a_map_takes_references(pool: sky.ComputePool) -> None:
    refs = [numbers(start).keep() >> pool for start in range(3)]
    assert [value for value, _ in pool.map(first, refs)] == [0.0, 1.0, 2.0]
    assert pool.map(lambda array, plus: float(array[0]) + plus, refs, [1, 1, 1]) == [1.0, 2.0, 3.0]


def test_a_value_that_was_put_is_sent_where_it_is_used(pool: sky.ComputePool) -> None:
    array = np.arange(LENGTH)
    ref = pool.put(array)
    array[0] = 7  # not seen
    assert not ref.nodes
    assert first(ref) >> pool.node(1) == (0.0, 1)
    assert ref.nodes == (1,)
    assert pool.put(np.zeros(LENGTH), nodes=[0, 1]).nodes == (0, 1)
    assert first(pool.put(np.zeros(LENGTH), nodes=[1])) >> pool == (0.0, 1)


def test_tasks_write_to_copies(pool: sky.ComputePool) -> None:
    @sky.compute
    def spoil(array: Any) -> None:
        array[:] = -1

    ref = numbers(0).keep() >> pool
    spoil(ref) >> pool
    ref.get()[:] = -1
    assert first(ref) >> pool.node(0) == (0.0, 0)
    assert ref.get()[0] == 0.0


def test_the_same_value_again_costs_no_page_faults_and_its_mapping_goes_with_it(pool: sky.ComputePool) -> None:
    @sky.compute
    def touch(array: Any) -> tuple[int, int]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert array[::512].sum() == np.arange(0, 4 * LENGTH, 512).sum()
        return os.getpid(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def maps(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    ref = pool.put(np.arange(4 * LENGTH, dtype=np.float64), nodes=[0])
    faults: dict[int, list[int]] = {}
    pid = 0
    while 3 not in map(len, faults.values()):  # either slot may take it
        pid, count = touch(ref) >> pool.node(0)
        faults.setdefault(pid, []).append(count)
    first_time, *again = faults[pid]
    assert min(again) < first_time / 4
    assert "memfd:skyward-blob" in maps(pid)
    ref.drop()
    until(lambda: all("memfd:skyward-blob" not in maps(pid) for pid in faults))


def test_small_values_are_part_of_the_reference(pool: sky.ComputePool) -> None:
    ref = sky.compute(divmod)(7, 2).keep() >> pool
    assert (ref.get(), ref.nodes) == ((3, 1), ())
    assert sky.compute(max)(ref) >> pool == 3  # type: ignore[arg-type]  # a type variable hides its items
    assert sky.compute(len)(pool.put("x" * 1_000_000)) >> pool == 1_000_000


def test_a_task_passes_a_reference_on(pool: sky.ComputePool) -> None:
    @sky.compute
    def outer(refs: list[sky.Ref[Any]], target: sky.ComputePool) -> tuple[float, int]:
        return first(refs[0]) >> target

    assert (outer([numbers(8).keep() >> pool], pool) >> pool)[0] == 8.0


def test_a_gang_takes_references_and_its_value_can_stay(pool: sky.ComputePool) -> None:
    @sky.compute
    @sky.integrations.jax(processes_per_node=1)
    def ranked(array: Any) -> Any:
        return array + 1

    pytest.importorskip("jax")
    kept = ranked(numbers(1).keep() >> pool.node(0)).keep() @ pool
    assert [ref.nodes for ref in kept] == [(0, 1), (0, 1)]  # equal values have one name
    assert [float(ref.get()[0]) for ref in kept] == [2.0, 2.0]


# Their end ------------------------------------------------------------------------------------------------------------


def test_the_node_forgets_what_nobody_refers_to(pool: sky.ComputePool) -> None:
    until(lambda: gc.collect() >= 0 and blobs(pool, 0) == blobs(pool, 1) == 0)
    ref: Any = numbers(1).keep() >> pool.node(0)
    first(ref) @ pool
    until(lambda: (blobs(pool, 0), blobs(pool, 1)) == (1, 1))
    ref.drop()
    until(lambda: blobs(pool, 0) == blobs(pool, 1) == 0)
    assert "dropped" in repr(ref)
    with pytest.raises(UsageError, match="was dropped"):
        first(ref) >> pool
    ref = numbers(2).keep() >> pool.node(1)
    del ref
    gc.collect()
    until(lambda: blobs(pool, 1) == 0)
    with pool.put(np.zeros(LENGTH), nodes=[0]):
        until(lambda: blobs(pool, 0) == 1)
    until(lambda: blobs(pool, 0) == 0)


def test_equal_values_are_stored_once_and_stay_until_both_are_dropped(pool: sky.ComputePool) -> None:
    one: Any = numbers(9).keep() >> pool.node(0)
    other = numbers(9).keep() >> pool.node(0)
    until(lambda: blobs(pool, 0) == 1)
    del one
    gc.collect()
    assert first(other) >> pool == (9.0, 0)
    other.drop()
    until(lambda: blobs(pool, 0) == 0)


def test_a_call_that_was_sent_keeps_the_value(pool: sky.ComputePool, tmp_path: Path) -> None:
    def wait(path: Path) -> None:
        until(path.exists)

    ref = numbers(4).keep() >> pool.node(0)
    busy = [sky.compute(wait)(tmp_path / "go") > pool.node(0) for _ in range(2)]
    later = first(ref) > pool.node(0)
    ref.drop()
    (tmp_path / "go").touch()
    assert later.result(60) == (4.0, 0)
    for future in busy:
        future.result(60)
    del later
    until(lambda: blobs(pool, 0) == 0)


def test_a_cancelled_call_and_a_killed_slot_leave_nothing(tmp_path: Path) -> None:
    @sky.compute
    def slow(path: Path) -> Any:
        path.touch()
        time.sleep(60)
        return np.zeros(LENGTH)

    class Killer:
        """Kills the process when it is pickled, behind an array that was pickled before."""

        def __reduce__(self) -> Any:
            os.kill(os.getpid(), 9)

    with sky.ComputePool(provider=sky.Local(), nodes=1, concurrency=2, logs=False) as pool:
        future = slow(tmp_path / "began").keep() > pool
        until((tmp_path / "began").exists)
        assert future.cancel()
        with pytest.raises(sky.errors.SlotLost):
            sky.compute(lambda: [np.zeros(LENGTH), Killer()])().keep() >> pool
        with pytest.raises(ZeroDivisionError):
            sky.compute(lambda: 1 // 0)().keep() >> pool
        for quick in [numbers(1).keep() > pool for _ in range(20)]:
            quick.cancel()
        del quick  # its value may have come before
        assert first(numbers(2)) >> pool == (2.0, 0)
        until(lambda: blobs(pool, 0) == 0)


def test_a_lost_node_loses_kept_values_but_not_those_that_were_put() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False) as pool:
        faults = Faults(pool)
        kept = numbers(1).keep() >> pool.node(1)
        copied = numbers(2).keep() >> pool.node(1)
        put = pool.put(np.zeros(LENGTH), nodes=[1])
        assert first(copied) >> pool.node(0) == (2.0, 0)
        faults.kill_node(1)
        faults.wait_until_whole()
        for use in (lambda: first(kept) >> pool, lambda: first(kept) @ pool, kept.get):
            with pytest.raises(RefLost, match="1600000 bytes are gone"):
                use()
        assert first(copied) >> pool.node(1) == (2.0, 1)
        assert first(put) >> pool.node(1) == (0.0, 1)
        assert sky.compute(abs)(-1) @ pool == [1, 1]


def test_a_value_that_is_lost_on_its_way_fails_the_calls_that_wait_for_it() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False) as pool:
        kept = numbers(1).keep() >> pool.node(1)
        os.kill(agent := pool.agent_pids()[1], 19)  # it cannot answer
        waiting = first(kept) > pool.node(0)
        other = sky.compute(abs)(-1) > pool.node(0)
        assert other.result(60) == 1  # overtakes the call that waits
        os.kill(agent, 9)
        with pytest.raises(RefLost):
            waiting.result(60)


def test_memory_beyond_the_limit_goes_to_the_disk_and_is_reported() -> None:
    events: list[sky.events.Event] = []
    provider = sky.Local()
    with sky.ComputePool(provider=provider, nodes=1, logs=False, on_event=events.append) as pool:
        ref = pool.put(np.zeros(4 * LENGTH), nodes=[0])

        def reported() -> list[float]:
            return [e.values_gib for e in list(events) if isinstance(e, sky.events.NodeUsage)]

        until(lambda: any(gib * 2**30 >= ref.nbytes - 1000 for gib in reported()))


def test_a_reference_refuses_other_ways(pool: sky.ComputePool) -> None:
    ref = numbers(1).keep() >> pool
    with pytest.raises(UsageError, match="pass it as one"):
        sky.compute(lambda: [ref])() >> pool
    with pytest.raises(UsageError, match=r"nodes=7"):
        pool.put(1, nodes=[7])
    with pytest.raises(sky.errors.ArgumentNotPicklable, match=r"put\(\): a generator"):
        pool.put(x for x in "ab")


def test_a_closed_pool_has_only_what_the_program_has() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=1, logs=False) as pool:
        kept = numbers(1).keep() >> pool
        put = pool.put(np.zeros(LENGTH))
    assert put.get()[0] == 0.0
    assert kept.nodes == ()
    with pytest.raises(PoolClosed):
        kept.get()
