"""Graphs of calls: calls as arguments run first, once for each send, and their values do not pass the program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import NodeLost, RefLost, UsageError
from skyward.testing import Faults
from tests.kept import failing, first, flat, node, noted
from tests.waiting import lines_of, until, until_text


@sky.compute
def add(a: float, b: float) -> float:
    return a + b


@sky.compute
def large() -> Any:
    return np.full(200_000, float(node()))


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, logs=False) as pool:
        yield pool


def test_calls_as_arguments_run_first(pool: sky.ComputePool) -> None:
    one, two = add(0, 1), add(1, 1)
    assert add(one, two) >> pool == 3
    named = add(add(one, two), b=two)  # type: ignore[call-overload]  # checkers know positional ones only
    assert (named > pool).result(60) == 5
    assert pool.submit(add, one, 4).result(60) == 5
    assert pool.executor().submit(add, one, 4).result(60) == 5


def test_calls_in_containers_run_first(pool: sky.ComputePool) -> None:
    one = add(0, 1)
    assert flat([one, 7], (one,), {"a": [one]}, b=one) >> pool == [[1, 7], (1,), {"a": [1]}, {"b": 1}]


@pytest.mark.parametrize(
    "send",
    [
        lambda call, pool: call >> pool,
        lambda call, pool: call @ pool,
        lambda call, pool: (call & call) >> pool,
        lambda call, pool: list(sky.gather(call, call, stream=True) >> pool),
        lambda call, pool: (sky.gather(call, flat([call])) > pool).result(60),
    ],
    ids=["one node", "all nodes", "a group", "a stream", "a future"],
)
def test_a_call_runs_once_for_each_send(
    pool: sky.ComputePool, tmp_path: Path, send: Callable[[Any, sky.ComputePool], object]
) -> None:
    path = tmp_path / "lines"
    call = noted(path, 5)
    graph = flat(call, [call, flat(call)], {"a": call})
    send(graph, pool)
    assert lines_of(path) == ["5"]
    send(graph, pool)
    assert lines_of(path) == ["5", "5"]


def test_one_call_arrives_as_one_object(pool: sky.ComputePool) -> None:
    call = flat(1)
    assert sky.compute(lambda a, b: a is b and a is b)(call, call) >> pool
    assert sky.compute(lambda a, b: a is b[0])(call, [call]) @ pool == [True, True]


def test_a_call_goes_where_its_arguments_are(pool: sky.ComputePool) -> None:
    for _ in range(4):
        value, there = first(large()) >> pool
        assert value == there
    assert first(large()) >> pool.node(1) == (1.0, 1)
    ((made, zero), (made_too, one)) = first(large()) @ pool
    assert (zero, one) == (0, 1)
    assert made == made_too


def test_a_kept_call_in_a_container_arrives_as_a_reference(pool: sky.ComputePool) -> None:
    kinds = sky.compute(lambda items, item: [type(item).__name__, *(type(i).__name__ for i in items)])
    call = large().keep()
    assert kinds([call, large()], call) >> pool == ["ndarray", "Ref", "ndarray"]
    assert isinstance(add(add(1, 1), 1).keep() >> pool, sky.Ref)


def test_each_call_keeps_its_own_options(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "lines"

    @sky.compute(retries=2, retry_on=LookupError)
    def third_time(path: Path) -> int:
        with path.open("a") as file:
            file.write("tried\n")
        if len(path.read_text().splitlines()) < 3:
            raise LookupError
        return 1

    assert add(third_time(path), 1) >> pool == 2
    with pytest.raises(sky.errors.TaskTimeout, match="until"):
        flat(sky.compute(until)(lambda: False).with_timeout(0.2)) >> pool


def test_a_failure_is_raised_as_itself_with_its_path(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    graph = add(noted(path, add(failing(1), 1)), 2)
    for send in (lambda: graph >> pool, lambda: graph @ pool, lambda: (graph > pool).result(60)):
        with pytest.raises(LookupError, match="no 1") as caught:
            send()
        assert "Graph of calls: add <- noted <- add <- failing, which failed" in caught.value.__notes__
    assert lines_of(path) == []  # those that need it never start
    good, bad = add(1, 1) > pool, sky.gather(add(1, 1), graph) > pool
    assert good.result(60) == 2
    with pytest.raises(LookupError):
        bad.result(60)


def test_an_argument_that_cannot_be_pickled_is_named(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.errors.ArgumentNotPicklable, match=r"add\(\): argument 2"):
        add(add(1, 2), threading.Lock()) >> pool  # type: ignore[call-overload]
    with pytest.raises(sky.errors.ArgumentNotPicklable, match=r"add\(\): argument 1"):
        add(add(threading.Lock(), 1), 2) >> pool  # type: ignore[call-overload]


def test_cancelling_a_graph_stops_what_runs_and_begins_nothing(pool: sky.ComputePool, tmp_path: Path) -> None:
    began, ended, late = (tmp_path / name for name in ("began", "ended", "late"))

    @sky.compute
    def endless(began: Path, ended: Path) -> None:
        try:
            began.touch()
            until(lambda: False, 60)
        finally:
            ended.touch()

    future = noted(late, endless(began, ended)) > pool
    until(began.exists)
    assert future.cancel()
    until(ended.exists)
    assert add(1, 1) >> pool == 2
    assert not late.exists()


def test_long_chains_and_wide_graphs(pool: sky.ComputePool) -> None:
    call = add(0, 0)
    for _ in range(1100):  # deeper than Python's stack
        call = add(call, 1)
    assert repr(call).startswith("<add(add(add(...), 1), 1), not run")
    assert call >> pool == 1100
    call = failing(1)
    for _ in range(20):
        call = flat(call)
    with pytest.raises(LookupError) as caught:
        call >> pool
    assert "flat <- flat <- flat <- ... <- flat <- flat <- failing, which" in caught.value.__notes__[-1]
    twice = add(0, 1)
    for _ in range(40):  # 2 ** 40 paths
        twice = add(twice, twice)
    assert twice >> pool == 2**40
    assert flat([add(i, 0) for i in range(300)]) >> pool == [list(range(300))]


class TestMap:
    def test_calls_among_the_items_run_first(self, pool: sky.ComputePool) -> None:
        items = [add(i, 1) if i % 3 else i for i in range(40)]
        expected = [-i - 1 if i % 3 else -i for i in range(40)]
        for pool_map in (pool.map, pool.imap):
            assert list(pool_map(lambda x: -x, items)) == expected
            assert list(pool_map(lambda x: -x, iter(items), chunk=7)) == expected
        assert sorted(pool.imap(lambda x: -x, items, ordered=False)) == sorted(expected)
        assert pool.map(lambda a, b: (a, b), [[add(1, 1)], {"a": [add(1, 2)]}], [add(0, add(1, 4)), 6]) == [
            ([2], 5),
            ({"a": [3]}, 6),
        ]
        assert pool.map(abs, [*range(-50, 0), add(-1, 0)]) == [*range(50, 0, -1), 1]
        assert pool.map(lambda refs: type(refs[0]).__name__, [[large().keep()]]) == ["Ref"]

    def test_a_call_that_items_share_runs_once(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        path = tmp_path / "lines"
        shared = noted(path, 5)
        for items in ([add(shared, i) for i in range(30)], (add(shared, i) for i in range(30))):
            assert pool.map(abs, items) == list(range(5, 35))
        assert lines_of(path) == ["5", "5"]
        assert list(pool.imap(abs, [add(shared, i) for i in range(3)])) == [5, 6, 7]  # each item is a send
        assert lines_of(path) == ["5"] * 5

    def test_a_failure_stops_the_map_or_takes_the_place_of_a_value(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        path = tmp_path / "lines"
        good = [noted(path, i) for i in range(1000)]
        with pytest.raises(LookupError, match="no 1") as caught:
            pool.map(abs, [failing(1), *good])
        assert "Graph of calls: abs <- failing, which failed" in caught.value.__notes__
        assert len(lines_of(path)) < 500  # the rest never starts
        error, value = pool.map(abs, [flat(failing(2)), add(-1, 0)], return_exceptions=True)
        assert (repr(error), value) == ("LookupError('no 2')", 1)

    def test_closing_the_iterator_cancels_the_graphs_that_run(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        began, ended = tmp_path / "began", tmp_path / "ended"
        read: list[int] = []

        @sky.compute
        def endless(began: Path, ended: Path) -> int:
            try:
                began.touch()
                until(lambda: False, 60)
            finally:
                ended.touch()
            return 1

        def items() -> Iterator[Any]:
            for i in range(1000):
                read.append(i)
                yield endless(began, ended) if i else 0

        values = pool.imap(abs, items())
        assert next(values) == 0
        until(began.exists)
        values.close()  # type: ignore[attr-defined]
        until(ended.exists)
        assert len(read) <= 9  # two for each slot

    def test_an_item_that_is_lost_runs_again_with_its_value(self, tmp_path: Path) -> None:
        path = tmp_path / "node"

        @sky.compute(retries=1)
        def once_lost(value: int) -> int:
            if value == 3 and not path.exists():
                path.write_text(str(node()))
                until(lambda: False, 60)
            return value

        with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False) as pool:
            found: list[int] = []
            calls = [add(i, 0).with_options(retries=1) for i in range(6)]  # some may run on the node that dies
            mapping = threading.Thread(target=lambda: found.extend(pool.map(once_lost, calls)))
            mapping.start()
            Faults(pool).kill_node(int(until_text(path)))
            mapping.join(60)
            assert found == list(range(6))


def test_a_lost_node_fails_the_graph_unless_its_call_may_run_again(tmp_path: Path) -> None:
    @sky.compute
    def once_lost(path: Path) -> Any:
        if not path.exists():
            path.write_text(str(node()))
            until(lambda: False, 60)
        return np.zeros(200_000)

    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False) as pool:
        faults = Faults(pool)
        for name, retries in (("a", 0), ("b", 1)):
            path = tmp_path / name
            future = first(once_lost(path).with_options(retries=retries)) > pool
            faults.kill_node(int(until_text(path)))
            if retries:
                assert future.result(60)[0] == 0.0
            else:
                with pytest.raises(NodeLost) as caught:
                    future.result(60)
                assert "Graph of calls: first <- once_lost, which failed" in caught.value.__notes__
            faults.wait_until_whole()


def test_a_chain_whose_middle_loses_its_node_fails_with_its_path(tmp_path: Path) -> None:
    began = tmp_path / "began"

    @sky.compute(retries=1)
    def middle(array: Any, path: Path) -> Any:
        if not path.exists():
            path.write_text(str(node()))
            until(lambda: False, 60)
        return array

    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False) as pool:
        faults = Faults(pool)
        future = first(middle(large(), began)) > pool
        faults.kill_node(int(until_text(began)))  # it runs where its argument lies, and nowhere else has it
        with pytest.raises(RefLost) as caught:
            future.result(60)
        assert "Graph of calls: first <- middle, which failed" in caught.value.__notes__
        faults.wait_until_whole()
        assert first(middle(large(), began)) @ pool


def test_closing_the_pool_waits_for_graphs_and_cancelling_ends_them(tmp_path: Path) -> None:
    def wait(path: Path) -> int:
        until(path.exists)
        return 1

    waits = sky.compute(wait)
    with sky.ComputePool(provider=sky.Local(), nodes=1, logs=False) as pool:
        future = add(add(add(1, 1), 1), 1) > pool
    assert future.result(0) == 4
    with pytest.raises(ZeroDivisionError), sky.ComputePool(provider=sky.Local(), nodes=1, logs=False) as pool:
        future = add(waits(tmp_path / "never"), 1) > pool
        assert 1 // 0
    with pytest.raises(sky.errors.PoolClosed):
        future.result(60)


def test_graphs_that_cannot_run_are_refused(pool: sky.ComputePool) -> None:
    items: list[Any] = []
    circle = flat(items)
    items.append(circle)
    with pytest.raises(UsageError, match="an argument of itself"):
        circle >> pool

    @sky.compute
    def counted() -> Iterator[int]:
        yield 1

    with pytest.raises(UsageError, match=r"counted\(\): a generator function"):
        flat(counted()) >> pool
    with pytest.raises(sky.errors.ResultNotPicklable, match="has not run"):
        sky.compute(lambda: add(1, 1))() >> pool
