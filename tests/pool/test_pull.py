"""Large arguments that slots read from this process's memory: of callers that wait, and copies for futures."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import skyward as sky
from skyward.errors import SlotLost
from skyward.pool.pool import ComputePool
from skyward.wire import huge, payloads
from skyward.wire.pull import PullRefused, is_possible, place_of, pull
from tests.engines import engine_of
from tests.waiting import until

pytestmark = pytest.mark.skipif(not is_possible(), reason="only Linux reads another process's memory")

BIG = 1_500_000


@pytest.fixture
def pool(lending_pool: ComputePool) -> ComputePool:
    return lending_pool


@pytest.fixture
def stayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the buffers that became no blobs."""
    sizes: list[int] = []

    def noted(data: memoryview) -> bytes:
        sizes.append(data.nbytes)
        return place_of(data)

    monkeypatch.setattr(payloads, "place_of", noted)
    return sizes


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this kernel make no huge pages for files. Otherwise futures send their arrays as files."""
    monkeypatch.setattr(huge, "is_possible", lambda: False)


@sky.compute
def same(value: Any) -> Any:
    return value


@sky.compute
def total(array: Any) -> float:
    return float(array.sum())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(BIG),
        np.arange(BIG, dtype=np.float32).reshape(1000, -1),
        np.asfortranarray(np.arange(BIG).reshape(1000, -1)),
        np.arange(4 * BIG, dtype=np.int8),
        np.frombuffer(os.urandom(BIG), dtype=np.uint8),  # not writable
        np.arange(20 * BIG, dtype=np.int16),  # read by two threads
    ],
    ids=["int64", "2d", "fortran", "int8", "readonly", "60MB"],
)
def test_arrays_arrive_unchanged(pool: ComputePool, stayed: list[int], array: np.ndarray[Any, Any]) -> None:
    result = same(array) >> pool
    np.testing.assert_array_equal(result, array)
    assert result.dtype == array.dtype
    assert result.flags.f_contiguous == array.flags.f_contiguous
    assert stayed == [array.nbytes]


def test_several_large_arguments_of_any_type_arrive(pool: ComputePool, stayed: list[int]) -> None:
    text, frame = os.urandom(400_000), pd.DataFrame({"a": np.arange(BIG), "b": np.arange(BIG) * 0.5})
    got_text, got_frame, number = same((text, frame, 3)) >> pool
    assert (got_text, number) == (text, 3)
    pd.testing.assert_frame_equal(got_frame, frame)
    assert len(stayed) >= 2


def test_a_task_may_write_and_the_caller_does_not_see_it(pool: ComputePool, stayed: list[int]) -> None:
    @sky.compute
    def fill(array: Any) -> float:
        array[:] = 7
        return float(array.sum())

    array = np.ones(BIG)
    assert fill(array) >> pool == 7.0 * BIG
    assert array.sum() == BIG
    assert stayed


def test_an_array_changed_between_two_calls_arrives_changed(pool: ComputePool) -> None:
    array = np.zeros(BIG)
    for number in range(5):
        array[:] = number
        assert total(array) >> pool == number * BIG


@pytest.mark.parametrize("options", [{"retries": 1}, {"retries": 1, "retry_on": (ValueError,)}], ids=["loss", "error"])
def test_arguments_that_may_be_sent_again_are_sent_as_blobs(
    pool: ComputePool, stayed: list[int], options: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path)

    @sky.compute
    def once(array: Any) -> float:
        mark = Path(folder, "mark")
        if not mark.exists():
            mark.touch()
            if "retry_on" not in options:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("again")
        return float(array.sum())

    assert once.with_options(**options)(np.ones(BIG)) >> pool == BIG
    assert not stayed


def test_a_process_that_dies_is_named(pool: ComputePool) -> None:
    @sky.compute
    def die(array: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(SlotLost, match="SIGKILL"):
        die(np.ones(BIG)) >> pool
    assert total(np.ones(BIG)) >> pool == BIG


def test_memory_that_cannot_be_read_goes_as_blobs_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def nowhere(data: memoryview) -> bytes:
        tried.append(data.nbytes)
        return place_of(data)[:8] + (8).to_bytes(8, "little")  # nothing lies at address 8

    monkeypatch.setattr(payloads, "place_of", nowhere)
    with sky.ComputePool(sky.Local()) as pool:
        engine = engine_of(pool)
        until(engine.leader.may_pull)
        for number in range(3):
            assert total(np.full(BIG, number)) >> pool == number * BIG
        assert tried == [8 * BIG]
        assert not engine.leader.can_pull


@pytest.mark.parametrize("pages", ["small_pages", "huge_pages"])
def test_a_future_gets_its_array_as_it_was_when_it_was_sent(
    pool: ComputePool, stayed: list[int], pages: str, request: pytest.FixtureRequest
) -> None:
    if pages == "small_pages":
        request.getfixturevalue(pages)
    array = np.full(BIG, 3)
    future = total(array) > pool
    array[:] = 0
    assert future.result() == 3 * BIG
    assert set(stayed) == (set() if huge.is_possible() else {array.nbytes})


@pytest.mark.usefixtures("small_pages")
def test_an_array_of_futures_becomes_a_blob_when_it_is_sent_again(pool: ComputePool, stayed: list[int]) -> None:
    array = np.full(BIG, 5)
    assert (total(array) > pool).result() == 5 * BIG
    once = len(stayed)
    until(engine_of(pool).leader.may_pull)
    assert (total(array) > pool).result() == 5 * BIG
    assert len(stayed) == once + 1  # it was asked about, and not copied


@pytest.mark.usefixtures("small_pages")
def test_the_copy_for_a_future_that_cannot_be_read_is_sent_as_a_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[memoryview] = []

    def copied(place: bytes, size: int) -> memoryview:
        copies.append(pull(place, size))
        return copies[-1]

    def nowhere(data: memoryview) -> bytes:
        place = place_of(data)
        return place[:8] + (8).to_bytes(8, "little") if any(data is copy for copy in copies) else place

    monkeypatch.setattr(payloads, "pull", copied)
    monkeypatch.setattr(payloads, "place_of", nowhere)
    with sky.ComputePool(sky.Local()) as pool:
        engine = engine_of(pool)
        until(engine.leader.may_pull)
        for number in range(3):
            assert (total(np.full(BIG, number)) > pool).result() == number * BIG
        assert len(copies) == 1
        assert not engine.leader.can_pull


@pytest.mark.parametrize("pages", ["small_pages", "huge_pages"])
def test_futures_of_many_threads_get_their_arrays(
    pool: ComputePool, pages: str, request: pytest.FixtureRequest
) -> None:
    if pages == "small_pages":
        request.getfixturevalue(pages)

    def call(start: int) -> list[bool]:
        return [(total(np.full(BIG, n)) > pool).result() == n * BIG for n in range(start, start + 5)]

    with ThreadPoolExecutor(4) as threads:
        assert all(all(right) for right in threads.map(call, range(10, 50, 10)))


def test_many_threads_can_send_arrays(pool: ComputePool) -> None:
    wrong: list[float] = []

    def call(start: int) -> None:
        for number in range(start, start + 15):
            got = total(np.full(100_000, number)) >> pool
            if got != number * 100_000:
                wrong.append(got)

    threads = [threading.Thread(target=call, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_slot_reads_only_what_it_may() -> None:
    data = np.arange(3_000_000)
    view = data.data.cast("B")
    copied = pull(place_of(view), view.nbytes)
    assert copied == view
    assert not copied.readonly
    with pytest.raises(PullRefused, match=f"process {os.getpid()}"):
        pull(place_of(view)[:8] + (8).to_bytes(8, "little"), 1000)
