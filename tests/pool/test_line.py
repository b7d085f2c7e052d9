"""The direct line between a waiting caller and a slot: which calls use it, and that nothing is lost beside it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import skyward as sky
from skyward.errors import SlotLost, TaskTimeout
from skyward.pool.pool import ComputePool
from skyward.values.machine import LogLine
from tests.engines import engine_of
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("patient_output")


@pytest.fixture(scope="module")
def lines() -> list[LogLine]:
    return []


@pytest.fixture(scope="module")
def pool(lines: list[LogLine]) -> Iterator[ComputePool]:
    with sky.ComputePool(sky.Local(), nodes=1, concurrency=2, logs=lines.append) as pool:
        until(lambda: has_line(pool))
        yield pool


def has_line(pool: ComputePool) -> bool:
    return engine_of(pool).ledger.links[0].line is not None


def line_number(pool: ComputePool) -> int:
    line = engine_of(pool).ledger.links[0].line
    return 0 if line is None else line.number


def on_line(pool: ComputePool) -> int:
    return engine_of(pool).ledger.links[0].on_line


@sky.compute
def identity(value: object) -> object:
    return value


@sky.compute
def process() -> int:
    return os.getpid()


@sky.compute
def die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(30)


@sky.compute
def wait_for(path: str, limit_s: float = 30.0) -> str:
    Path(path + ".begun").touch()
    deadline = time.monotonic() + limit_s
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)
    return Path(path).read_text()


@sky.compute
def put(path: str, text: str) -> None:
    Path(path + ".new").write_text(text)
    os.rename(path + ".new", path)


def test_successive_calls_stay_in_one_process(pool: ComputePool) -> None:
    assert len({process() >> pool for _ in range(20)}) == 1


def test_values_too_large_for_the_line_go_through_the_agent(pool: ComputePool) -> None:
    for size in (10, 60_000, 70_000, 300_000, 5_000_000):
        data = bytes(range(256)) * (size // 256 + 1)
        assert identity(data) >> pool == data
    array = np.arange(1_000_000)
    np.testing.assert_array_equal(identity(array) >> pool, array)


def test_output_comes_before_the_value(pool: ComputePool, lines: list[LogLine]) -> None:
    @sky.compute
    def shout(number: int) -> int:
        print("call", number)
        return number

    for number in range(30):
        assert shout(number) >> pool == number
        assert [line.text for line in lines if line.text == f"call {number}"], "the value was there first"


def test_an_error_has_its_traceback_and_the_last_lines(pool: ComputePool) -> None:
    @sky.compute
    def fail() -> None:
        print("before the end")
        raise LookupError("nothing here")

    with pytest.raises(LookupError, match="nothing here") as caught:
        fail() >> pool
    notes = "\n".join(caught.value.__notes__)
    assert "in fail" in notes
    assert "before the end" in notes


def test_a_task_that_kills_its_process_is_named_and_the_next_call_works(pool: ComputePool) -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV):
        until(lambda: has_line(pool))
        with pytest.raises(SlotLost, match=signal.Signals(number).name) as caught:
            die(int(number)) >> pool
        assert caught.value.started is True
        assert identity(1) >> pool == 1


def test_a_lost_call_with_retries_runs_again(pool: ComputePool, tmp_path: Path) -> None:
    marks = str(tmp_path)

    @sky.compute(retries=1)
    def die_once() -> int:
        mark = Path(marks, "died")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    until(lambda: has_line(pool))
    assert die_once() >> pool == 7


def test_a_slot_that_dies_between_two_calls_fails_no_call(pool: ComputePool) -> None:
    for _ in range(5):
        until(lambda: has_line(pool))
        number = line_number(pool)
        os.kill(process() >> pool, signal.SIGKILL)
        assert identity("on") >> pool == "on"
        until(lambda: line_number(pool) > number)  # noqa: B023  # called at once


def test_another_call_runs_beside_the_one_on_the_line(pool: ComputePool, tmp_path: Path) -> None:
    """The first call waits for an effect of the second. If the second waited behind it, neither would end."""
    until(lambda: has_line(pool))
    on_the_line = 0
    with ThreadPoolExecutor(1) as callers:
        for number in range(20):
            path = str(tmp_path / str(number))
            first = callers.submit(pool.run, wait_for(path))
            until(Path(path + ".begun").exists)
            on_the_line += bool(on_line(pool))
            put(path, "done") >> pool
            assert first.result() == "done"
    assert on_the_line  # not always: the first may find a line whose slot has just died


def test_a_call_on_the_line_can_time_out(pool: ComputePool, tmp_path: Path) -> None:
    until(lambda: has_line(pool))
    with pytest.raises(TaskTimeout):
        wait_for.with_options(timeout_s=0.3)(str(tmp_path / "never")) >> pool
    assert identity(2) >> pool == 2


def test_many_threads_share_one_line(pool: ComputePool) -> None:
    wrong: list[object] = []

    def call(start: int) -> None:
        for number in range(start, start + 100):
            if (got := identity(number) >> pool) != number:
                wrong.append((number, got))

    threads = [threading.Thread(target=call, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_hundreds_of_functions_are_forgotten_and_sent_again(pool: ComputePool) -> None:
    def adder(more: int) -> sky.ComputeFunction[[int], int]:
        @sky.compute
        def add(number: int) -> int:
            return number + more

        return add

    adders = [adder(n) for n in range(600)]
    for round_ in range(2):
        assert [a(round_) >> pool for a in adders] == [n + round_ for n in range(600)]


def test_a_function_is_the_same_on_the_line_and_through_the_agent(pool: ComputePool) -> None:
    """Each process loads the function once, however it came, so its globals exist once."""

    @sky.compute
    def count(seen: list[int] = []) -> tuple[int, int]:  # noqa: B006  # on purpose
        seen.append(1)
        return os.getpid(), len(seen)

    counts: dict[int, list[int]] = {}
    for _ in range(10):
        for pid, number in (count() >> pool, (count() > pool).result()):
            counts.setdefault(pid, []).append(number)
    for numbers in counts.values():
        assert numbers == list(range(1, len(numbers) + 1))


def test_futures_of_single_calls_use_the_line_too(pool: ComputePool) -> None:
    for number in range(50):
        assert (identity(number) > pool).result(timeout=None if number % 2 else 30) == number
    assert len({(process() > pool).result() for _ in range(20)}) == 1


def test_a_future_on_the_line_completes_without_a_waiting_thread(pool: ComputePool) -> None:
    for number in range(20):
        future = identity(number) > pool
        until(future.done)
        assert future.result() == number


def test_several_threads_wait_for_one_future_on_the_line(pool: ComputePool, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as waiters:
        for number in range(20):
            path = str(tmp_path / str(number))
            future = wait_for(path) > pool
            waiting = [waiters.submit(future.result) for _ in range(4)]
            until(Path(path + ".begun").exists)
            put(path, "done") >> pool
            assert [one.result() for one in waiting] == ["done"] * 4


def test_a_future_on_the_line_can_be_cancelled(pool: ComputePool, tmp_path: Path) -> None:
    for number in range(5):
        path = str(tmp_path / str(number))
        future = wait_for(path) > pool
        until(Path(path + ".begun").exists)
        assert future.cancel()
        assert identity(number) >> pool == number
