"""`pool.map` and `pool.imap`, against every map bug that was found in other libraries."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import ArgumentNotPicklable, NodeLost, ResultNotPicklable, SlotLost, TaskTimeout, UsageError
from skyward.testing import Faults
from tests.channels import Relayed
from tests.waiting import lines_of, until


@pytest.fixture(scope="module")
def shared(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=2, logs=False, cancel_grace_s=30)


@pytest.fixture
def pool(shared: sky.ComputePool) -> Iterator[sky.ComputePool]:
    """Pool whose next map must work after each test."""
    yield shared
    assert shared.map(abs, range(-8, 0)) == list(range(8, 0, -1))


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.ComputePool]:
    """Pool with a node that is 60 ms away, there and back, and whose two slots run."""
    folder = tmp_path_factory.mktemp("far")
    with sky.ComputePool(Relayed(delay_s=0.03), nodes=1, concurrency=2, logs=False) as pool:
        assert len(set(sky.gather(*(sky.compute(meet)(folder, number, 2) for number in range(2))) >> pool)) == 2
        yield pool


def meet(folder: Path, number: int, count: int) -> int:
    """Wait until `count` processes run this. Returns the process."""
    (folder / str(number)).touch()
    until(lambda: len(os.listdir(folder)) == count)
    return os.getpid()


def square(x: int) -> int:
    return x * x


def inverse(x: int) -> float:
    return 1 / x


def noted(items: list[int], item: int) -> int:
    """Return `item` after it was added to `items`."""
    items.append(item)
    return item


class TestValues:
    @pytest.mark.parametrize("chunk", ["auto", 1, 7, 1000])
    def test_values_come_in_the_order_of_the_input(self, pool: sky.ComputePool, chunk: Any) -> None:
        assert pool.map(square, range(300), chunk=chunk) == [x * x for x in range(300)]

    def test_unordered_map_gives_the_same_values(self, pool: sky.ComputePool) -> None:
        assert sorted(pool.map(square, range(300), ordered=False)) == [x * x for x in range(300)]

    def test_many_tiny_calls_give_their_values(self, pool: sky.ComputePool) -> None:
        assert pool.map(square, range(30_000)) == [x * x for x in range(30_000)]

    def test_values_and_items_keep_their_types(self, pool: sky.ComputePool) -> None:
        class Level(IntEnum):
            ONE = 1

        def same(value: Any) -> Any:
            return value, type(value).__name__

        items = [1, True, 1.0, Level.ONE, np.int64(1), np.float64(1), 1 << 40, None]
        for odd in items:
            for some in ([*[7] * 40, odd, *[7] * 40], [*[7.0] * 40, odd, *[7.0] * 40]):
                got = pool.map(lambda value: value, some)
                assert [(type(v).__name__, v) for v in got] == [(type(v).__name__, v) for v in some]
                assert pool.map(same, some) == [(v, type(v).__name__) for v in some]

    def test_numbers_of_a_list_and_a_tuple_arrive(self, pool: sky.ComputePool) -> None:
        for numbers in (list(range(60_000)), tuple(range(60_000)), [x / 7 for x in range(60_000)]):
            assert pool.map(square, numbers) == [x * x for x in numbers]

    @pytest.mark.parametrize("nothing", [[], (), iter([]), range(0), {}])
    def test_a_map_of_nothing_gives_nothing(self, pool: sky.ComputePool, nothing: Any) -> None:
        assert pool.map(square, nothing) == []
        assert list(pool.imap(square, nothing)) == []

    def test_a_map_of_one_item_gives_one_value(self, pool: sky.ComputePool) -> None:
        assert pool.map(square, [3]) == [9]

    def test_a_generator_is_an_input(self, pool: sky.ComputePool) -> None:
        assert pool.map(square, (x for x in range(50))) == [x * x for x in range(50)]

    def test_several_iterables_end_with_the_shortest(self, pool: sky.ComputePool) -> None:
        assert pool.map(pow, range(5), [2, 2, 2]) == [0, 1, 4]
        assert pool.map(lambda a, b, c: a + b + c, [1], "", itertools.count()) == []
        assert pool.map(lambda a, b: f"{a}{b}", "ab", itertools.count()) == ["a0", "b1"]

    def test_a_tuple_is_one_argument(self, pool: sky.ComputePool) -> None:
        assert pool.map(len, [(1, 2), (3,)]) == [2, 1]

    def test_none_and_falsy_values_are_kept(self, pool: sky.ComputePool) -> None:
        assert pool.map(lambda x: x, [None, 0, "", [], None]) == [None, 0, "", [], None]
        assert list(pool.imap(lambda x: x, [None, None], ordered=False)) == [None, None]

    def test_a_compute_function_keeps_its_name_and_options(self, pool: sky.ComputePool) -> None:
        slow = sky.compute(timeout_s=0.2, name="slow one")(time.sleep)
        with pytest.raises(TaskTimeout, match="'slow one': ran longer"):
            pool.map(slow, [60])

    def test_large_values_and_results_arrive(self, pool: sky.ComputePool) -> None:
        blobs = [bytes([i]) * 400_000 for i in range(6)]
        assert pool.map(lambda b: b[::-1], blobs) == blobs

    def test_several_threads_may_map_at_once(self, pool: sky.ComputePool) -> None:
        results: dict[int, list[int]] = {}

        def run(n: int) -> None:
            results[n] = pool.map(square, range(n, n + 200))

        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {n: [x * x for x in range(n, n + 200)] for n in range(4)}

    def test_calls_run_on_all_slots(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        assert len(set(pool.map(lambda number: meet(tmp_path, number, 4), range(4)))) == 4

    @pytest.mark.parametrize("chunk", [0, -1, 1.5, True, "big", None])
    def test_a_wrong_chunk_is_refused(self, pool: sky.ComputePool, chunk: Any) -> None:
        with pytest.raises(UsageError, match="chunk="):
            pool.map(square, [1], chunk=chunk)

    def test_objects_that_are_no_function_or_no_iterable_are_refused(self, pool: sky.ComputePool) -> None:
        with pytest.raises(UsageError, match=r"map\(\): 3 is not a function"):
            pool.map(3, [1])  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="pass at least one iterable"):
            pool.map(square)
        with pytest.raises(TypeError, match="not iterable"):
            pool.map(square, 3)  # type: ignore[call-overload]

    def test_a_generator_function_is_refused(self, pool: sky.ComputePool) -> None:
        def count(n: int) -> Iterator[int]:
            yield n

        with pytest.raises(UsageError, match="generator function"):
            pool.map(count, [1])


class TestErrors:
    @pytest.mark.parametrize("chunk", ["auto", 1, 4])
    def test_the_first_error_is_raised_unchanged(self, pool: sky.ComputePool, chunk: Any) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            pool.map(inverse, [1, 2, 0, 4, 0], chunk=chunk)
        assert "1 / x" in "".join(caught.value.__notes__)

    def test_values_before_the_error_arrive(self, pool: sky.ComputePool) -> None:
        values = pool.imap(inverse, [1, 2, 0, 4], chunk=4)
        assert [next(values), next(values)] == [1, 0.5]
        with pytest.raises(ZeroDivisionError):
            next(values)
        assert list(values) == []

    def test_an_error_stops_the_calls_beside_it(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        def wait_or_fail(x: int) -> None:
            if x == 0:
                until(lambda: len(os.listdir(tmp_path)) >= 3)
                raise KeyError("early")
            (tmp_path / f"{x}").touch()
            threading.Event().wait(60)

        started = time.monotonic()
        with pytest.raises(KeyError, match="early"):
            pool.map(wait_or_fail, range(50))
        assert time.monotonic() - started < 50  # the calls beside it would wait for a minute
        assert len(os.listdir(tmp_path)) < 20

    @pytest.mark.parametrize("chunk", ["auto", 1, 4])
    def test_return_exceptions_gives_the_original_types(self, pool: sky.ComputePool, chunk: Any) -> None:
        values: list[Any] = pool.map(inverse, [1, 0, "x", 2], chunk=chunk, return_exceptions=True)
        assert [type(v) for v in values] == [float, ZeroDivisionError, TypeError, float]
        assert "1 / x" in "".join(values[1].__notes__)

    def test_an_exception_with_an_awkward_constructor_survives_a_map(self, pool: sky.ComputePool) -> None:
        class Awkward(Exception):
            def __init__(self, code: int, *, hint: str) -> None:
                super().__init__(hint)
                self.code = code

        def fail(x: int) -> None:
            raise Awkward(x, hint="h")

        values: list[Any] = pool.map(fail, [1, 2], return_exceptions=True)
        assert [(type(v), v.code) for v in values] == [(Awkward, 1), (Awkward, 2)]
        with pytest.raises(Awkward):
            pool.map(fail, [1])

    def test_starmap_errors_name_the_function(self, pool: sky.ComputePool) -> None:
        with pytest.raises(TypeError, match="positional argument"):
            pool.map(square, [1, 2], [3, 4])
        values: list[Any] = pool.map(square, [1, 2], [3, 4], return_exceptions=True)
        assert [type(v) for v in values] == [TypeError, TypeError]

    def test_one_result_that_cannot_be_pickled_is_an_error(self, pool: sky.ComputePool) -> None:
        def sometimes(x: int) -> Any:
            return threading.Lock() if x == 2 else x

        with pytest.raises(ResultNotPicklable, match="lock"):
            pool.map(sometimes, range(4), chunk=4)
        values = pool.map(sometimes, range(4), chunk=4, return_exceptions=True)
        assert isinstance(values[2], ResultNotPicklable)
        assert [values[0], values[1], values[3]] == [0, 1, 3]

    def test_one_argument_that_cannot_be_pickled_is_an_error(self, pool: sky.ComputePool) -> None:
        with pytest.raises(ArgumentNotPicklable, match=r"map\(\): an item between 0 and 3 cannot be sent: .*lock"):
            pool.map(str, [1, 2, threading.Lock(), 3], chunk=4)

    def test_sys_exit_in_a_call_is_an_error(self, pool: sky.ComputePool) -> None:
        with pytest.raises(sky.errors.TaskExited, match="sys.exit"):
            pool.map(exit, [3], chunk=2)

    def test_sys_exit_in_a_call_is_its_value_where_exceptions_are(self, pool: sky.ComputePool) -> None:
        def leave(x: int) -> int:
            if x == 2:
                raise SystemExit("a wrong argument")
            return x

        first, second, exited, last = pool.map(leave, range(4), chunk=4, return_exceptions=True)
        assert (first, second, last) == (0, 1, 3)
        assert isinstance(exited, sky.errors.TaskExited)
        assert exited.code == "a wrong argument"

    @pytest.mark.parametrize("return_exceptions", [False, True])
    def test_an_error_of_the_input_is_always_raised(self, pool: sky.ComputePool, return_exceptions: bool) -> None:
        def broken() -> Iterator[int]:
            yield from range(10)
            raise LookupError("the file ended")

        with pytest.raises(LookupError, match="the file ended"):
            pool.map(square, broken(), return_exceptions=return_exceptions)

    def test_imap_gives_the_values_before_the_input_failed(self, pool: sky.ComputePool) -> None:
        def broken() -> Iterator[int]:
            yield from range(3)
            raise LookupError("the file ended")

        got = []
        with pytest.raises(LookupError):
            for value in pool.imap(square, broken(), chunk=1):
                got.append(value)
        assert got == [0, 1, 4]

    def test_a_timeout_applies_to_each_call_and_not_to_the_chunk(self, pool: sky.ComputePool) -> None:
        nap = sky.compute(timeout_s=2.0)(time.sleep)
        assert pool.map(nap, [0.06] * 40, chunk=40) == [None] * 40

    def test_retry_on_runs_only_the_failed_call_again(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        @sky.compute(retries=1, retry_on=OSError)
        def flaky(x: int) -> int:
            with (tmp_path / str(x)).open("a") as file:
                file.write("ran\n")
            if x == 3 and len(lines_of(tmp_path / "3")) == 1:
                raise OSError("down")
            return x

        assert pool.map(flaky, range(6), chunk=6) == list(range(6))
        assert [len(lines_of(tmp_path / str(x))) for x in range(6)] == [1, 1, 1, 2, 1, 1]


class TestLazy:
    def test_an_endless_input_is_read_as_results_are_taken(self, pool: sky.ComputePool) -> None:
        read = itertools.count()
        numbers = (next(read) for _ in itertools.repeat(None))
        values = pool.imap(square, numbers, chunk=1)
        assert [next(values) for _ in range(5)] == [0, 1, 4, 9, 16]
        values.close()  # type: ignore[attr-defined]
        assert next(read) <= 5 + 4 * pool.total_slots

    def test_a_slow_first_call_does_not_make_it_read_ahead(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        read: list[int] = []

        def first_waits(x: int) -> int:
            if x == 0:
                until((tmp_path / "go").exists)
            return x

        values = pool.imap(first_waits, (noted(read, x) for x in itertools.count()), chunk=1)
        threading.Timer(0.5, (tmp_path / "go").touch).start()
        assert next(values) == 0
        assert len(read) <= 1 + 4 * pool.total_slots
        values.close()  # type: ignore[attr-defined]

    def test_max_inflight_limits_the_calls_in_flight(
        self, sky_pools: Callable[..., sky.ComputePool], tmp_path: Path
    ) -> None:
        def most_at_once(x: int) -> int:
            (tmp_path / str(x)).touch()
            time.sleep(0.02)
            count = len(os.listdir(tmp_path))
            (tmp_path / str(x)).unlink()
            return count

        pool = sky_pools(nodes=1, concurrency=4, logs=False, max_inflight=2)
        assert max(pool.map(most_at_once, range(20))) <= 2

    def test_an_endless_input_works_with_growing_chunks(self, pool: sky.ComputePool) -> None:
        values = pool.imap(square, itertools.count())
        assert list(itertools.islice(values, 2000)) == [x * x for x in range(2000)]
        values.close()  # type: ignore[attr-defined]

    def test_nothing_is_read_before_the_first_value_is_requested(self, pool: sky.ComputePool) -> None:
        read: list[int] = []
        values = pool.imap(square, (noted(read, x) for x in range(5)))
        assert read == []
        assert next(values) == 0
        values.close()  # type: ignore[attr-defined]

    def test_dropping_the_iterator_cancels_the_calls_in_flight(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        def wait_after_first(x: int) -> int:
            if x:
                try:
                    (tmp_path / f"{x}").touch()
                    threading.Event().wait(60)
                finally:
                    (tmp_path / f"{x}.stopped").touch()
            return x

        values = pool.imap(wait_after_first, itertools.count(), chunk=1)
        assert next(values) == 0
        until(lambda: len(os.listdir(tmp_path)) >= 3)
        del values
        until(lambda: len(list(tmp_path.glob("*.stopped"))) >= 3)

    def test_wrong_arguments_are_refused_at_once(self, pool: sky.ComputePool) -> None:
        with pytest.raises(UsageError):
            pool.imap(square, [1], chunk=0)

    def test_a_slow_reader_loses_no_values(self, pool: sky.ComputePool) -> None:
        got = []
        for value in pool.imap(square, range(40), chunk=2):
            time.sleep(0.002)
            got.append(value)
        assert got == [x * x for x in range(40)]


class TestLosses:
    """A slot or node dies during a map. Delivered values stay, and calls that had not begun run elsewhere."""

    @pytest.fixture
    def faults(self, pool: sky.ComputePool) -> Iterator[Faults]:
        faults = Faults(pool)
        faults.wait_until_whole()
        yield faults
        faults.wait_until_whole()

    def dying(self, folder: Path, victim: int, retries: int = 0) -> Any:
        """Write a line for each call. The victim's first run kills its slot.

        Each call takes a millisecond: of tiny calls, a whole block counts as begun.
        """

        @sky.compute(retries=retries)
        def call(x: int) -> int:
            time.sleep(0.001)
            ran = folder / str(x)
            with ran.open("a") as file:
                file.write("ran\n")
            if x == victim and len(lines_of(ran)) == 1:
                os.kill(os.getpid(), 9)
            return x * x

        return call

    def test_the_call_that_had_begun_is_lost(self, pool: sky.ComputePool, faults: Faults, tmp_path: Path) -> None:
        with pytest.raises(SlotLost, match="killed by signal 9") as caught:
            pool.map(self.dying(tmp_path, 5), range(10), chunk=10)
        assert caught.value.started is True
        assert not (tmp_path / "6").exists()

    def test_the_other_calls_of_its_chunk_run_once_each(
        self, pool: sky.ComputePool, faults: Faults, tmp_path: Path
    ) -> None:
        values = pool.map(self.dying(tmp_path, 5), range(10), chunk=10, return_exceptions=True)
        assert isinstance(values[5], SlotLost)
        assert values[6:] == [x * x for x in range(6, 10)]
        # Calls before it had begun as well: their values were sent in time, or were lost with the process.
        assert all(isinstance(v, SlotLost) or v == x * x for x, v in enumerate(values[:5]))
        assert all(len(lines_of(tmp_path / str(x))) == 1 for x in range(10))

    def test_with_retries_the_map_is_complete(self, pool: sky.ComputePool, faults: Faults, tmp_path: Path) -> None:
        assert pool.map(self.dying(tmp_path, 5, retries=1), range(10), chunk=10) == [x * x for x in range(10)]
        assert len(lines_of(tmp_path / "5")) == 2
        assert all(len(lines_of(tmp_path / str(x))) == 1 for x in range(6, 10))

    def test_with_retries_an_unordered_map_is_complete(
        self, pool: sky.ComputePool, faults: Faults, tmp_path: Path
    ) -> None:
        call = self.dying(tmp_path, 5, retries=1)
        assert sorted(pool.map(call, range(10), chunk=10, ordered=False)) == [x * x for x in range(10)]

    def test_delivered_results_stay(self, pool: sky.ComputePool, faults: Faults, tmp_path: Path) -> None:
        def slow_then_die(x: int) -> int:
            if x == 3:
                until((tmp_path / "die").exists)
                os.kill(os.getpid(), 9)
            time.sleep(0.02)  # results are sent every few milliseconds
            return x

        values = pool.imap(slow_then_die, range(6), chunk=6)
        assert [next(values) for _ in range(3)] == [0, 1, 2]
        (tmp_path / "die").touch()
        with pytest.raises(SlotLost):
            next(values)

    def test_a_call_that_always_kills_its_slot_ends_the_map(self, pool: sky.ComputePool, faults: Faults) -> None:
        @sky.compute(retries=2)
        def leave(_: int) -> None:
            os._exit(4)

        with pytest.raises(SlotLost, match="exited with code 4"):
            pool.map(leave, range(3))

    def test_with_retries_a_map_survives_a_lost_node(
        self, pool: sky.ComputePool, faults: Faults, tmp_path: Path
    ) -> None:
        @sky.compute(retries=1)
        def wait(x: int) -> int:
            (tmp_path / f"{x}").touch()
            until((tmp_path / "go").exists)
            return x

        def kill() -> None:
            until(lambda: len(os.listdir(tmp_path)) >= 4)
            faults.kill_node(0)
            (tmp_path / "go").touch()

        killer = threading.Thread(target=kill)
        killer.start()
        assert pool.map(wait, range(12), chunk=3) == list(range(12))
        killer.join()

    def test_a_lost_node_fails_the_map_without_retries(
        self, pool: sky.ComputePool, faults: Faults, tmp_path: Path
    ) -> None:
        def wait(x: int) -> int:
            (tmp_path / f"{x}").touch()
            until((tmp_path / "go").exists)
            return x

        def kill() -> None:
            until(lambda: len(os.listdir(tmp_path)) >= 4)
            faults.kill_node(1)
            (tmp_path / "go").touch()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(NodeLost, match="node 1 was lost"):
            pool.map(wait, range(12), chunk=1)
        killer.join()


class TestChunksAreEnded:
    """A chunk that takes longer than it should is ended between two calls, and its rest is cut again."""

    def test_calls_that_turn_slow_are_shared_by_all_slots(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        meeting = tmp_path / "meeting"
        meeting.mkdir()

        def call(x: int) -> int:
            if x < 2000:
                return 0
            time.sleep(0.01)
            with (tmp_path / str(x)).open("a") as file:
                file.write("ran\n")
            return os.getpid()

        assert len(set(pool.map(lambda number: meet(meeting, number, 4), range(4)))) == 4  # all slots run
        ran_in = pool.map(call, range(2300))[2000:]
        assert max(ran_in.count(pid) for pid in set(ran_in)) < 200
        assert all(len(lines_of(tmp_path / str(x))) == 1 for x in range(2000, 2300))

    def test_errors_stay_with_their_calls(self, pool: sky.ComputePool) -> None:
        def call(x: int) -> int:
            time.sleep(0.002 if x > 500 else 0)
            return x // (x % 100)

        values: list[Any] = pool.map(call, range(1000), return_exceptions=True)
        failed = [x for x, value in enumerate(values) if isinstance(value, ZeroDivisionError)]
        assert failed == list(range(0, 1000, 100))
        assert all(value == x // (x % 100) for x, value in enumerate(values) if x % 100)

    def test_an_iterator_gives_all_its_values_in_order(self, pool: sky.ComputePool) -> None:
        def call(x: int) -> int:
            time.sleep(0.004 if x > 100 else 0)
            return x

        assert list(pool.imap(call, (i for i in range(600)))) == list(range(600))


class TestFar:
    """Maps to a distant node: the sizes of the first chunks are guessed, and the guesses are wrong."""

    def test_tiny_calls_give_their_values(self, far: sky.ComputePool) -> None:
        assert far.map(square, range(200_000)) == [x * x for x in range(200_000)]

    @pytest.mark.parametrize("seconds", [0.002, 0.06])
    def test_slow_calls_run_once_each_on_both_slots(self, far: sky.ComputePool, tmp_path: Path, seconds: float) -> None:
        def call(x: int) -> int:
            time.sleep(seconds)
            with (tmp_path / str(x)).open("a") as file:
                file.write("ran\n")
            return os.getpid()

        count = int(2.4 / seconds)
        ran_in = far.map(call, range(count))
        assert all(len(lines_of(tmp_path / str(x))) == 1 for x in range(count))
        assert max(ran_in.count(pid) for pid in set(ran_in)) < 0.8 * count

    def test_a_slot_that_dies_loses_only_the_call_it_ran(self, far: sky.ComputePool, tmp_path: Path) -> None:
        def call(x: int) -> int:
            with (tmp_path / str(x)).open("a") as file:
                file.write("ran\n")
            time.sleep(0.002)
            if x == 30:
                os.kill(os.getpid(), 9)
            return x

        values: list[Any] = far.map(call, range(200), return_exceptions=True)
        assert isinstance(values[30], SlotLost)
        assert all(value == x or isinstance(value, SlotLost) for x, value in enumerate(values))
        assert all(len(lines_of(tmp_path / str(x))) == 1 for x in range(200))
        assert sum(isinstance(value, SlotLost) for value in values) < 10

    def test_a_time_limit_applies_to_each_call(self, far: sky.ComputePool) -> None:
        @sky.compute(timeout_s=3.0)
        def call(x: int) -> int:
            time.sleep(0.016)
            return x

        assert far.map(call, range(450)) == list(range(450))  # each slot works for longer than that
