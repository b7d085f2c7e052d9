"""Values that stay and graphs, of a running task: they work as in the program, and end with the task."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import ArgumentNotPicklable, RefLost, SlotLost, UsageError
from skyward.testing import Faults
from tests.engines import engine_of
from tests.kept import LENGTH, blobs, failing, first, flat, node, noted, numbers
from tests.waiting import lines_of, until


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=3, logs=False) as pool:
        yield pool


def held(pool: sky.ComputePool) -> int:
    """Return the number of references that the program holds for tasks."""
    values = engine_of(pool).nested_calls.held
    return len(values._held) + len(values._tasks)  # leftovers cost only memory


def is_clean(pool: sky.ComputePool) -> bool:
    gc.collect()  # errors of earlier tests hold frames, and these hold values
    return not held(pool) and all(blobs(pool, number) == 0 for number in pool.agent_pids())


class TestReferences:
    def test_a_value_that_a_task_keeps_stays_where_it_was_made(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def outer(there: Any, whole: Any) -> Any:
            ref = numbers(3).keep() >> there
            assert isinstance(ref, sky.Ref)
            assert LENGTH * 8 <= ref.nbytes < LENGTH * 8 + 1000
            return first(ref) >> whole, first(ref) @ whole, [float(ref.get()[0]) for _ in range(2)]

        assert outer(pool.node(1), pool) >> pool.node(0) == ((3.0, 1), [(3.0, 0), (3.0, 1)], [3.0, 3.0])

    def test_a_broadcast_and_a_future_keep_values_too(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def outer(whole: Any) -> Any:
            refs = numbers(1).keep() @ whole
            future = numbers(2).keep() > whole
            return [float(ref.get()[0]) for ref in (*refs, future.result())]

        assert outer(pool) >> pool == [1.0, 1.0, 2.0]

    def test_a_value_that_a_task_puts_stays_on_its_node(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def outer(whole: Any, other: Any) -> Any:
            array = np.ones(LENGTH)
            ref, small, sent = whole.put(array), whole.put("abc"), whole.put(array + 1, nodes=[0, 1])
            array[:] = 7  # not seen
            return first(ref) >> whole, ref.get()[0], small.get(), first(ref) >> other, first(sent) @ whole

        assert outer(pool, pool.node(0)) >> pool.node(1) == (
            (1.0, 1),
            1.0,
            "abc",
            (1.0, 0),
            [(2.0, 0), (2.0, 1)],
        )

    def test_a_task_writes_to_copies(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def outer(whole: Any) -> Any:
            ref = whole.put(np.ones(LENGTH))
            ref.get()[:] = 5
            return first(ref) >> whole, float(ref.get()[0])

        assert outer(pool) >> pool.node(0) == ((1.0, 0), 1.0)

    def test_references_go_on_and_back_by_name(self, pool: sky.ComputePool) -> None:
        """The program passes names on: it never gets the bytes of these values."""

        @sky.compute
        def give(whole: Any, there: Any) -> list[Any]:
            return [numbers(9).keep() >> there, whole.put(np.zeros(LENGTH)), whole.put(4)]

        @sky.compute
        def pass_on(refs: list[Any], whole: Any) -> Any:
            return refs[::-1], first(refs[0]) >> whole, flat(refs) >> whole

        there = pool.node(1)
        made = give(pool, there) >> pool.node(0)
        assert [ref.nodes for ref in made] == [(1,), (0,), ()]
        back, value, again = pass_on(made, pool) >> there
        assert value == (9.0, 1)
        assert [ref.get()[0] for ref in (back[2], back[1], *again[0][:2])] == [9.0, 0.0, 9.0, 0.0]
        assert back[0].get() == 4
        inner = sky.compute(lambda: [float(ref.get()[0]) for ref in (give(pool, there) >> pool)[:2]])
        assert inner() >> pool == [9.0, 0.0]
        del made, back, again
        until(lambda: is_clean(pool))

    def test_a_stream_yields_references(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def stream(whole: Any) -> Iterator[Any]:
            for start in range(3):
                yield numbers(start).keep() >> whole

        assert [ref.get()[0] for ref in stream(pool) >> pool] == [0.0, 1.0, 2.0]

    def test_a_map_returns_references(self, pool: sky.ComputePool) -> None:
        refs = pool.map(lambda start: numbers(start).keep() >> pool, range(4))
        assert [ref.get()[0] for ref in refs] == [0.0, 1.0, 2.0, 3.0]

    def test_a_value_that_stays_has_the_bytes_of_the_references_in_it(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def give(whole: Any, there: Any, given: list[Any]) -> list[Any]:
            return [numbers(9).keep() >> there, whole.put(np.zeros(LENGTH)), *given]

        kept = give(pool, pool.node(1), [pool.put(np.full(LENGTH, 2.0))]).keep() >> pool.node(0)
        assert kept.nodes == (0,)
        assert [ref.get()[0] for ref in kept.get()] == [9.0, 0.0, 2.0]
        del kept
        until(lambda: is_clean(pool))

    def test_a_reference_of_an_earlier_task_is_refused_or_brings_its_bytes(self) -> None:
        with sky.ComputePool(sky.Local(), nodes=1, concurrency=1, logs=False) as pool:

            @sky.compute
            def remember(given: list[Any]) -> None:
                vars(sky)["_remembered"] = given[0], pool.put(np.zeros(LENGTH))

            @sky.compute
            def use() -> Any:
                given, made = vars(sky).pop("_remembered")
                refused = 0
                for again in (made.get, lambda: pool.put([made]), lambda: flat(made) > pool):
                    try:
                        again()
                    except (UsageError, ArgumentNotPicklable) as error:
                        refused += "belongs to a task that has ended" in str(error)
                return given, given.get()[0], refused

            remember([pool.put(np.full(LENGTH, 6.0))]) >> pool
            given, value, refused = use() >> pool
            assert (given.get()[0], value, refused) == (6.0, 6.0, 3)
            until(lambda: is_clean(pool))

    def test_a_rank_of_a_gang_has_references(self, pool: sky.ComputePool) -> None:
        pytest.importorskip("jax")

        @sky.compute
        @sky.integrations.jax(processes_per_node=1)
        def ranked(given: list[Any]) -> Any:
            return float(given[0].get()[0])

        @sky.compute
        def outer(whole: Any) -> Any:
            return ranked([whole.put(np.full(LENGTH, 3.0))]) @ whole

        assert outer(pool) >> pool.node(0) == [3.0, 3.0]

    def test_thread_slots_have_references_and_graphs(self) -> None:
        with sky.ComputePool(sky.Local(), nodes=1, concurrency=3, executor="thread", logs=False) as pool:

            @sky.compute
            def outer(start: int, whole: Any) -> Any:
                ref = whole.put(np.full(LENGTH, float(start)))
                return float(ref.get()[0]), first(numbers(start)) >> whole, first(ref) >> whole

            futures = [outer(start, pool) > pool for start in range(2)]
            assert [future.result(60) for future in futures] == [(n, (n, 0), (n, 0)) for n in range(2)]
            until(lambda: is_clean(pool))

    def test_wrong_uses_are_refused(self, pool: sky.ComputePool) -> None:
        def refused(action: Callable[[Any], object]) -> str:
            try:
                action(pool)
            except (UsageError, ArgumentNotPicklable) as error:
                return str(error)
            return ""

        ask = sky.compute(refused)
        assert "put(): a generator cannot be kept" in ask(lambda pool: pool.put(x for x in "ab")) >> pool
        assert "nodes=7: not a node of" in ask(lambda pool: pool.put(1, nodes=[7])) >> pool
        part = pool.node(0)
        assert "a part of a pool has no put()" in ask(lambda _: vars(type(part))["put"](part, 1)) >> pool

        def captured(whole: Any) -> None:
            ref = numbers(1).keep() >> whole
            sky.compute(lambda: [ref])() >> whole

        assert "pass it as one" in ask(captured) >> pool

    def test_a_handle_puts_into_its_own_pool(self, pool: sky.ComputePool) -> None:
        import pickle

        handle = pickle.loads(pickle.dumps(pool))
        assert first(handle.put(np.ones(LENGTH), nodes=[1])) >> pool == (1.0, 1)


class TestGraphs:
    @pytest.mark.parametrize(
        "send",
        [
            lambda call, target: call >> target,
            lambda call, target: call @ target,
            lambda call, target: (call & call) >> target,
            lambda call, target: list(sky.gather(call, call, stream=True) >> target),
            lambda call, target: (sky.gather(call, flat([call])) > target).result(60),
            lambda call, target: target.submit(call).result(60),
        ],
        ids=["one node", "all nodes", "a group", "a stream", "a future", "submit"],
    )
    def test_a_call_runs_once_for_each_send(
        self, pool: sky.ComputePool, tmp_path: Path, send: Callable[[Any, Any], object]
    ) -> None:
        path = tmp_path / "lines"

        def outer(target: Any) -> None:
            call = noted(path, 5)
            graph = flat(call, [call, flat(call)], {"a": call}, b=call)
            send(graph, target)
            send(graph, target)

        sky.compute(outer)(pool) >> pool
        assert lines_of(path) == ["5", "5"]

    def test_values_go_from_call_to_call_and_not_through_the_task(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def outer(there: Any, whole: Any) -> Any:
            call = numbers(4)
            kept = flat([numbers(5).keep()], first(call)) >> whole
            return first(call) >> there, kept[0][0].get()[0], kept[1]

        value, inside, other = outer(pool.node(1), pool) >> pool.node(0)
        assert value == (4.0, 1)
        assert inside == 5.0
        assert other[0] == 4.0

    def test_a_failure_names_its_path_and_what_needs_it_never_runs(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        path = tmp_path / "lines"

        def outer() -> str:
            try:
                noted(path, flat(failing(3))) >> pool
            except LookupError as error:
                return f"{error}: {error.__notes__[-1]}"
            return ""

        assert sky.compute(outer)() >> pool == "no 3: Graph of calls: noted <- flat <- failing, which failed"
        assert lines_of(path) == []

    def test_each_call_keeps_its_options(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        path = tmp_path / "lines"

        @sky.compute(retries=2, retry_on=LookupError)
        def third_time() -> int:
            noted.fn(path, 1)
            if len(lines_of(path)) < 3:
                raise LookupError("again")
            return len(lines_of(path))

        assert sky.compute(lambda: flat(third_time()) >> pool)() >> pool == [3]

    def test_a_graph_as_a_value_is_refused(self, pool: sky.ComputePool) -> None:
        with pytest.raises(sky.errors.ResultNotPicklable):
            sky.compute(lambda: [flat(1)])() >> pool

    def test_a_graph_that_could_never_run_is_refused(self) -> None:
        with sky.ComputePool(sky.Local(), nodes=1, concurrency=1, logs=False) as pool:
            with pytest.raises(UsageError, match="could never run"):
                sky.compute(lambda: flat(flat(1)) >> pool)() >> pool
            assert flat(1) >> pool == [1]


class TestEnds:
    def test_values_that_a_task_forgets_are_freed_while_it_runs(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        until(lambda: is_clean(pool))

        def outer(dropped: Path, go: Path) -> None:
            refs = [numbers(1).keep() >> pool, pool.put(np.zeros(LENGTH)), *(numbers(2).keep() @ pool)]
            first(refs[0]) @ pool
            refs[0].drop()
            del refs
            first(numbers(3)) >> pool
            dropped.touch()
            until(go.exists, within_s=60)

        future = sky.compute(outer)(tmp_path / "dropped", tmp_path / "go") > pool
        until((tmp_path / "dropped").exists, within_s=60)
        until(lambda: is_clean(pool))
        (tmp_path / "go").touch()
        future.result(60)

    @pytest.mark.parametrize("how", ["returns", "raises", "dies", "is cancelled", "is late"])
    def test_references_and_graphs_end_with_their_task(self, pool: sky.ComputePool, tmp_path: Path, how: str) -> None:
        began, never = tmp_path / "began", tmp_path / "never"

        @sky.compute
        def hold(value: Any) -> Any:
            noted.fn(began, node())
            until(never.exists, within_s=60)
            return value

        def outer() -> None:
            refs = [numbers(1).keep() >> pool, pool.put(np.zeros(LENGTH)), numbers(2).keep() > pool]
            graph = first(hold(numbers(3))) > pool
            until(lambda: lines_of(began))
            if how == "raises":
                raise ValueError(refs)
            if how == "dies":
                os._exit(1)
            if how != "returns":
                graph.result()

        call = sky.compute(outer)()
        future = (call.with_timeout(8) if how == "is late" else call) > pool
        until(lambda: lines_of(began), within_s=60)
        if how == "is cancelled":
            future.cancel()
        elif how != "returns":
            assert future.exception(60) is not None
            del future
        else:
            future.result(60)
        until(lambda: is_clean(pool))
        assert first(numbers(1)) @ pool == [(1.0, 0), (1.0, 1)]

    def test_a_slot_that_is_killed_at_any_moment_leaks_nothing(self, pool: sky.ComputePool) -> None:
        def busy() -> int:
            while True:
                refs = [pool.put(np.zeros(LENGTH)), numbers(1).keep() >> pool]
                first(numbers(2)) >> pool
                first(refs[1]) >> pool
                refs[0].get(), refs[1].get()

        faults = Faults(pool)
        for step in range(6):
            future = sky.compute(lambda: (os.getpid(), busy()))() > pool.node(0)
            until(lambda: held(pool) > 0, within_s=60)
            time.sleep(0.013 * step)  # at another step each time; any is right
            for pid in faults.slots(0):  # one of them runs it
                if not future.done():
                    faults.kill_slot(0, pid=pid)
            assert isinstance(future.exception(60), SlotLost)
            del future
            faults.wait_until_whole()
        until(lambda: is_clean(pool))

    def test_the_loss_of_the_node_that_has_a_value_is_told(self, tmp_path: Path) -> None:
        with sky.ComputePool(sky.Local(), nodes=2, logs=False) as pool:
            there, here = pool.node(1), pool.node(0)

            def outer(go: Path) -> list[str]:
                ref, mine = numbers(1).keep() >> there, pool.put(np.ones(LENGTH))
                noted.fn(go, "kept")
                until(lambda: len(lines_of(go)) == 2, within_s=60)
                told = []
                for use in (lambda: first(ref) >> there, ref.get):
                    try:
                        use()
                    except RefLost as error:
                        told.append(type(error).__name__)
                return [*told, str(first(mine) >> there)]

            lines = tmp_path / "lines"
            future = sky.compute(outer)(lines) > here
            until(lambda: lines_of(lines), within_s=60)
            faults = Faults(pool)
            faults.kill_node(1)
            faults.wait_until_whole()
            noted.fn(lines, "killed")
            assert future.result(60) == ["RefLost", "RefLost", "(1.0, 1)"]
            until(lambda: is_clean(pool))

    def test_the_loss_of_the_tasks_own_node_frees_what_it_held(self, tmp_path: Path) -> None:
        with sky.ComputePool(sky.Local(), nodes=2, logs=False) as pool:
            there = pool.node(1)

            def outer(lines: Path) -> None:
                refs = [numbers(1).keep() >> there, pool.put(np.ones(LENGTH))]
                noted.fn(lines, len(refs))
                time.sleep(60)

            future = sky.compute(outer)(tmp_path / "lines") > pool.node(0)
            until(lambda: lines_of(tmp_path / "lines"), within_s=60)
            until(lambda: blobs(pool, 1) == 1)
            Faults(pool).kill_node(0)
            assert isinstance(future.exception(60), sky.errors.NodeLost)
            until(lambda: is_clean(pool))
