"""Generator functions stream out, and parameters annotated `Iterator[T]` stream in. Both have back-pressure."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import skyward as sky
from skyward.engine.task_events import TaskCounts
from skyward.engine.tasks import ResultStream
from skyward.errors import ArgumentNotPicklable, SlotLost, TaskTimeout, UsageError
from skyward.pool import idle_streams
from skyward.pool.streams import WINDOW
from tests.engines import hosted_pool
from tests.waiting import lines_of, until


@pytest.fixture(scope="module")
def shared(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=1, concurrency=2, logs=False, cancel_grace_s=3)


@pytest.fixture
def pool(shared: sky.ComputePool) -> Iterator[sky.ComputePool]:
    """Pool whose slots must both work at the end of each test."""
    yield shared
    assert [f.result(timeout=60) for f in [sky.compute(abs)(-i) > shared for i in range(4)]] == [0, 1, 2, 3]


@sky.compute
def count(n: int) -> Iterator[int]:
    yield from range(n)


@sky.compute
def numbered(notes: Path) -> Iterator[int]:
    """Yield numbers without end. Write a line for each item made, and one at the close."""

    def note(text: object) -> None:
        with notes.open("a") as file:
            file.write(f"{text}\n")

    try:
        for i in itertools.count():
            note(i)
            yield i
    finally:
        note("closed")


def settled(notes: Path) -> int:
    """Return how many items were made once no more come."""
    until(lambda: lines_of(notes))
    made = -1
    while made != len(lines_of(notes)):
        made = len(lines_of(notes))
        time.sleep(0.1)
    return made


class TestOut:
    @pytest.mark.parametrize("n", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 1000])
    def test_all_items_come_in_order(self, pool: sky.ComputePool, n: int) -> None:
        assert list(count(n) >> pool) == list(range(n))

    def test_the_named_method_and_a_future_stream_too(self, pool: sky.ComputePool) -> None:
        assert list(pool.run(count(3))) == [0, 1, 2]
        assert list((count(3) > pool).result(timeout=60)) == [0, 1, 2]

    def test_printing_a_stream_gives_advice(self, pool: sky.ComputePool) -> None:
        items = count(3) >> pool
        until(lambda: "3 values here" in repr(items))
        assert (list(items), repr(items)) == ([0, 1, 2], "<ResultStream ended, 0 values here; iterate over it>")

    def test_broadcast_gives_one_stream_for_each_node(self) -> None:
        @sky.compute
        def me(n: int) -> Iterator[Any]:
            info = sky.instance_info()
            assert info is not None
            for i in range(n):
                yield info.node, i

        with sky.ComputePool(sky.Local(), nodes=2, logs=False) as pool:
            streams = me(2) @ pool
            assert [list(s) for s in streams] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]

    def test_items_come_while_the_generator_runs(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        @sky.compute
        def steps() -> Iterator[int]:
            yield 1
            until((tmp_path / "go").exists)
            yield 2

        items = steps() >> pool
        assert next(items) == 1
        (tmp_path / "go").touch()
        assert list(items) == [2]

    def test_the_generator_is_ahead_of_its_consumer_by_at_most_the_window(
        self, pool: sky.ComputePool, tmp_path: Path
    ) -> None:
        items: Any = numbered(tmp_path / "notes") >> pool
        assert settled(tmp_path / "notes") <= WINDOW + 1
        taken = list(itertools.islice(items, 50))
        assert taken == list(range(50))
        assert settled(tmp_path / "notes") <= 50 + WINDOW + 1
        items.close()

    def test_closing_early_closes_the_remote_generator(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        items: Any = numbered(tmp_path / "notes") >> pool
        assert next(items) == 0
        items.close()
        items.close()
        until(lambda: lines_of(tmp_path / "notes")[-1] == "closed")
        assert list(items) == []

    def test_dropping_the_stream_closes_the_remote_generator(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        items: Any = numbered(tmp_path / "notes") >> pool
        assert next(items) == 0
        del items
        gc.collect()
        until(lambda: lines_of(tmp_path / "notes")[-1] == "closed")

    def test_breaking_out_of_a_loop_closes_the_remote_generator(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        for item in numbered(tmp_path / "notes") >> pool:
            if item == 5:
                break
        until(lambda: lines_of(tmp_path / "notes")[-1] == "closed")

    def test_closing_interrupts_a_busy_generator(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        @sky.compute
        def stuck() -> Iterator[int]:
            yield 1
            try:
                (tmp_path / "busy").touch()
                threading.Event().wait()
            finally:
                (tmp_path / "closed").touch()

        items: Any = stuck() >> pool
        assert next(items) == 1
        until((tmp_path / "busy").exists)
        items.close()
        until((tmp_path / "closed").exists)

    def test_an_error_in_the_middle_comes_after_the_items(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def breaks() -> Iterator[int]:
            yield 1
            yield 2
            raise KeyError("third")

        items = breaks() >> pool
        assert [next(items), next(items)] == [1, 2]
        with pytest.raises(KeyError, match="third"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)

    def test_an_error_before_the_first_item_is_raised(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def breaks() -> Iterator[int]:
            raise KeyError("at once")
            yield 1

        with pytest.raises(KeyError, match="at once"):
            list(breaks() >> pool)

    def test_the_return_value_arrives(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def returns() -> Generator[int, None, str]:
            yield 1
            return "done"

        items: Any = returns() >> pool
        assert list(items) == [1]
        assert items.value == "done"

        def delegate() -> Generator[int, None, str]:
            return (yield from returns() >> pool)

        generator = delegate()
        next(generator)
        with pytest.raises(StopIteration) as stop:
            next(generator)
        assert stop.value.value == "done"

    def test_large_items_arrive(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def blocks(n: int) -> Iterator[bytes]:
            for i in range(n):
                yield bytes([i]) * 500_000

        assert [b[0] for b in blocks(40) >> pool] == list(range(40))

    def test_two_streams_run_at_once(self, pool: sky.ComputePool) -> None:
        first, second = count(100) >> pool, count(100) >> pool
        assert list(zip(first, second, strict=True)) == [(i, i) for i in range(100)]

    def test_the_death_of_its_slot_is_reported(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def dies() -> Iterator[int]:
            yield 1
            os._exit(3)

        items = dies() >> pool
        assert next(items) == 1
        with pytest.raises(SlotLost, match="exited with code 3"):
            next(items)

    def test_a_timeout_ends_the_stream(self, pool: sky.ComputePool) -> None:
        @sky.compute(timeout_s=2)
        def stuck() -> Iterator[int]:
            yield 1
            threading.Event().wait()

        items: Any = stuck() >> pool
        assert next(items) == 1
        with pytest.raises(TaskTimeout, match=r"'stuck': ran longer than its timeout_s=2"):
            next(items)

    @pytest.mark.usefixtures("patient_output")
    def test_output_comes_before_the_item_that_follows_it(self) -> None:
        lines: list[str] = []

        @sky.compute
        def talks() -> Iterator[int]:
            for i in range(5):
                print("before", i)
                yield i

        with sky.ComputePool(sky.Local(), logs=lambda line: lines.append(line.text)) as pool:
            for i in talks() >> pool:
                assert f"before {i}" in lines


class TestIn:
    def test_an_iterator_is_streamed_in(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def total(items: Iterator[int]) -> int:
            return sum(items)

        assert total(iter(range(500))) >> pool == sum(range(500))
        assert total(x for x in range(3)) >> pool == 3
        assert total([1, 2, 3]) >> pool == 6  # type: ignore[call-overload]
        assert total(iter(())) >> pool == 0
        assert total(items=iter([4])) >> pool == 4

    def test_several_iterators_are_streamed_in(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def pairs(first: Iterator[int], scale: int, second: Iterator[str]) -> list[Any]:
            return [(a * scale, b) for a, b in zip(first, second, strict=False)]

        assert pairs(iter(range(100)), 2, iter("abc")) >> pool == [(0, "a"), (2, "b"), (4, "c")]

    def test_a_call_can_stream_in_and_out_at_once(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def doubled(items: Iterator[int]) -> Iterator[int]:
            for item in items:
                yield 2 * item

        assert list(doubled(iter(range(200))) >> pool) == [2 * i for i in range(200)]

    def test_an_endless_iterator_is_read_no_further_than_needed(self, pool: sky.ComputePool) -> None:
        read = itertools.count()

        @sky.compute
        def first(items: Iterator[int], n: int) -> list[int]:
            return list(itertools.islice(items, n))

        assert first((next(read) for _ in itertools.repeat(0)), 10) >> pool == list(range(10))
        time.sleep(0.1)
        assert next(read) <= 10 + WINDOW + 2

    def test_an_error_of_the_iterator_arrives_unchanged(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def total(items: Iterator[int]) -> int:
            return sum(items)

        @sky.compute
        def doubled(items: Iterator[int]) -> Iterator[int]:
            for item in items:
                yield 2 * item

        def broken() -> Iterator[int]:
            yield 1
            raise LookupError("my file ended")

        with pytest.raises(LookupError, match="my file ended"):
            total(broken()) >> pool
        items = doubled(broken()) >> pool
        assert next(items) == 2
        with pytest.raises(LookupError, match="my file ended"):
            next(items)

    def test_an_item_that_cannot_be_pickled_is_reported(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def total(items: Iterator[Any]) -> int:
            return len(list(items))

        with pytest.raises((ArgumentNotPicklable, TypeError), match="lock"):
            total(iter([1, threading.Lock()])) >> pool

    def test_retries_of_inputs_that_cannot_be_read_twice_are_refused(self, pool: sky.ComputePool) -> None:
        @sky.compute(retries=1)
        def total(items: Iterator[int]) -> int:
            return sum(items)

        with pytest.raises(UsageError, match="reads an iterator, which cannot be read twice; use retries=0"):
            total(iter([1])) >> pool

    def test_large_items_are_streamed_in(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def firsts(items: Iterator[bytes]) -> list[int]:
            return [item[0] for item in items]

        assert firsts(bytes([i]) * 500_000 for i in range(40)) >> pool == list(range(40))

    def test_cancelling_the_call_stops_the_reading(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        read: list[int] = []

        @sky.compute
        def slow(items: Iterator[int]) -> None:
            for _ in items:
                (tmp_path / "began").touch()
                time.sleep(0.01)

        future = slow(read.append(i) or i for i in itertools.count()) > pool  # type: ignore[func-returns-value]
        until((tmp_path / "began").exists)
        assert future.cancel()
        assert sky.compute(abs)(-1) >> pool == 1
        until(lambda: not [t for t in threading.enumerate() if t.name.startswith("skyward-feed")])

    def test_dropping_a_stream_stops_the_reading(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def doubled(items: Iterator[int]) -> Iterator[int]:
            for item in items:
                yield 2 * item

        items = doubled(itertools.count()) >> pool
        assert next(items) == 0
        del items
        until(lambda: not [t for t in threading.enumerate() if t.name.startswith("skyward-feed")])

    def test_the_same_large_item_may_come_repeatedly(self, pool: sky.ComputePool) -> None:
        block = b"x" * 400_000

        @sky.compute
        def lengths(items: Iterator[bytes]) -> list[int]:
            time.sleep(0.2)  # several of them wait
            return [len(item) for item in items]

        assert lengths(iter([block, b"small", block, block, b"s", block])) >> pool == [
            400_000,
            5,
            400_000,
            400_000,
            1,
            400_000,
        ]

    def test_a_call_that_reads_nothing_leaves_no_thread(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def ignore(items: Iterator[int]) -> int:
            return 1

        assert ignore(itertools.count()) >> pool == 1
        until(lambda: not [t for t in threading.enumerate() if t.name.startswith("skyward-feed")])


@pytest.mark.parametrize("open_pool", [partial(sky.ComputePool, sky.Local()), hosted_pool], ids=["direct", "hosted"])
def test_unread_streams_that_hold_all_slots_are_reported_once(
    open_pool: Callable[..., sky.ComputePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_streams, "IDLE_S", 0.1)
    told: list[str] = []

    def note(event: sky.events.Event) -> None:
        if isinstance(event, sky.events.Overlooked):
            told.append(event.text)

    with open_pool(logs=False, on_event=note) as pool:
        stream: Any = count(1000) >> pool
        for value in stream:
            if value == 2:
                break
        waiting = sky.compute(abs)(-1) > pool
        until(lambda: "'count' holds a slot, and nobody has read it for 0.1 s; call its close()" in waiting.why_waiting)
        until(lambda: told)
        another = sky.compute(abs)(-2) > pool
        stream.close()
        assert (waiting.result(timeout=60), another.result(timeout=60)) == (1, 2)
        assert another.why_waiting == ""
    (text,) = told
    assert text.startswith(
        "calls wait for a slot; a stream of 'count' holds a slot, and nobody has read it for 0.1 s; call its close()"
    )


class _BusyPool:
    """Engine of a pool with a waiting call, in as far as the hints ask it."""

    counted = TaskCounts(busy=1, queued=1, ended=0, failed=0)

    def counts(self) -> TaskCounts:
        return self.counted

    def why_waiting(self, call: int) -> str:
        return "waits for a slot: 0 free"


def unread() -> ResultStream[int]:
    stream: ResultStream[int] = ResultStream(lambda _: None, lambda: None, lambda: None, WINDOW)
    stream.put(lambda: 0)
    return stream


def test_each_unread_stream_is_hinted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_streams, "IDLE_S", 0.0)
    engine = _BusyPool()
    watched = idle_streams.IdleStreams(cast(Any, engine))
    first, second = unread(), unread()
    watched.add(first, "rows")
    assert "'rows'" in watched.hint()
    assert watched.hint() == ""
    watched.add(second, "lines")
    assert "'lines'" in watched.hint()
    assert watched.hint() == ""
    assert "2 streams of 'rows', 'lines' hold slots" in watched.why_waiting(1)
    first.close()
    second.close()
    assert watched.why_waiting(1) == "waits for a slot: 0 free"


@pytest.mark.parametrize("counted", [{"busy": 2}, {"queued": 0}, {"why": "waits for 2 GPUs: 1 free"}])
def test_unread_streams_give_no_hint_when_calls_wait_for_others_too(
    counted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_streams, "IDLE_S", 0.0)
    engine = _BusyPool()
    engine.counted = replace(engine.counted, **counted)
    watched, stream = idle_streams.IdleStreams(cast(Any, engine)), unread()
    watched.add(stream, "rows")
    assert watched.hint() == ""
