"""Large values of calls on a direct line: this process reads them from the memory of their slot."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.engine import tasks
from skyward.errors import PoolClosed, SlotLost
from skyward.pool.pool import ComputePool
from skyward.wire.pull import PullRefused, is_possible, pull
from tests.engines import engine_of
from tests.waiting import until

pytestmark = pytest.mark.skipif(not is_possible(), reason="only Linux reads another process's memory")

BIG = 1_500_000
LATER_S = 0.05
"""Duration of a call after which the I/O thread, not its caller, reads the value."""


@pytest.fixture
def pool(lending_pool: ComputePool) -> ComputePool:
    return lending_pool


Copy = Callable[[bytes, int], memoryview]


class Copies:
    """Copies that this process made of values, and what it does instead of one."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.instead: Copy = pull

    def copy(self, place: bytes, size: int) -> memoryview:
        self.sizes.append(size)
        return self.instead(place, size)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    noted = Copies()
    monkeypatch.setattr(tasks, "pull", noted.copy)
    return noted


@sky.compute
def ones(count: int = BIG, after_s: float = 0.0, text: str = "") -> Any:
    time.sleep(after_s)
    if text:
        print(text)
    return np.ones(count)


def refuse(place: bytes, size: int) -> memoryview:
    raise PullRefused(f"{size} bytes at {place.hex()}: refused by the test")


@pytest.mark.parametrize("after_s", [0.0, LATER_S])
def test_a_large_value_is_copied_once_and_may_be_written(pool: ComputePool, copies: Copies, after_s: float) -> None:
    value = ones(after_s=after_s) >> pool
    value += 1
    assert value.sum() == 2 * BIG
    assert copies.sizes == [8 * BIG]


def test_the_value_of_a_future_is_copied_before_anybody_asks_for_it(pool: ComputePool, copies: Copies) -> None:
    future = ones(after_s=LATER_S) > pool
    until(future.done)
    assert copies.sizes == [8 * BIG]
    assert [(ones() > pool).result().sum() for _ in range(3)] == 3 * [BIG]
    assert future.result().sum() == BIG


def test_several_buffers_of_a_value_are_copied(pool: ComputePool, copies: Copies) -> None:
    @sky.compute
    def several() -> Any:
        return {"a": np.ones(BIG), "b": [np.full(BIG, 2), "text"], "c": os.urandom(400_000)}

    value = several() >> pool
    assert (value["a"].sum(), value["b"][0].sum(), value["b"][1], len(value["c"])) == (BIG, 2 * BIG, "text", 400_000)
    assert sorted(copies.sizes) == [400_000, 8 * BIG, 8 * BIG]


@pytest.mark.usefixtures("patient_output")
def test_small_values_and_those_of_calls_that_print_travel_as_blobs(
    pool: ComputePool, copies: Copies, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (ones(100_000) >> pool).sum() == 100_000
    assert (ones(text="printed first") >> pool).sum() == BIG
    assert not copies.sizes
    assert "printed first" in capfd.readouterr().out


def test_values_of_calls_through_the_agent_travel_as_blobs(pool: ComputePool, copies: Copies) -> None:
    futures = [ones(after_s=LATER_S) > pool for _ in range(4)]
    assert [future.result().sum() for future in futures] == 4 * [BIG]
    assert copies.sizes in ([], [8 * BIG])  # the first call was alone when it was sent


@pytest.mark.parametrize("after_s", [0.0, LATER_S])
def test_a_value_that_cannot_be_copied_is_sent_and_no_other_is_tried(copies: Copies, after_s: float) -> None:
    copies.instead = refuse
    with sky.ComputePool(sky.Local()) as pool:
        until(engine_of(pool).leader.may_pull)
        for _ in range(3):
            assert (ones(after_s=after_s) >> pool).sum() == BIG
    assert copies.sizes == [8 * BIG]


def test_the_death_of_a_slot_during_the_copy_fails_its_call(pool: ComputePool, copies: Copies) -> None:
    def kill(place: bytes, size: int) -> memoryview:
        os.kill(struct.unpack("<QQ", place)[0], signal.SIGKILL)
        return refuse(place, size)

    copies.instead = kill
    with pytest.raises(SlotLost, match="SIGKILL"):
        ones() >> pool
    copies.instead = pull
    assert (ones() >> pool).sum() == BIG


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_call_that_is_cancelled_during_the_copy_has_no_value_and_its_slot_runs_others(
    pool: ComputePool, copies: Copies, is_refused: bool
) -> None:
    is_here, may_go = threading.Event(), threading.Event()

    def wait(place: bytes, size: int) -> memoryview:
        is_here.set()
        assert may_go.wait(60)
        return refuse(place, size) if is_refused else pull(place, size)

    copies.instead = wait
    future = ones(after_s=LATER_S) > pool
    assert is_here.wait(60)
    assert future.cancel()
    may_go.set()
    copies.instead = pull
    assert [value.sum() for value in [ones(10) >> pool for _ in range(4)]] == 4 * [10]
    assert future.cancelled()


def test_the_end_of_a_pool_during_the_copy_fails_the_call(copies: Copies) -> None:
    is_here, may_go = threading.Event(), threading.Event()

    def wait(place: bytes, size: int) -> memoryview:
        is_here.set()
        assert may_go.wait(60)
        return pull(place, size)

    copies.instead = wait
    pool = sky.ComputePool(sky.Local())
    pool.start()
    try:
        until(engine_of(pool).leader.may_pull)
        future = ones(after_s=LATER_S) > pool
        assert is_here.wait(60)
    finally:
        pool.close(cancel=True)
        may_go.set()
    with pytest.raises((PoolClosed, sky.errors.NodeError)):
        future.result(60)


def test_the_value_of_an_actor_is_copied(pool: ComputePool, copies: Copies) -> None:
    @sky.actor
    class Model:
        def weights(self) -> Any:
            return np.ones(BIG)

    made: Any = Model()
    model = made >> pool
    for _ in range(20):
        assert (model.weights() >> pool).sum() == BIG
    assert copies.sizes
