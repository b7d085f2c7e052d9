"""The reader of a `Parallel` call's values sleeps until they arrive, and misses none."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from joblib import Parallel, delayed
from joblib.parallel import TASK_DONE, TASK_PENDING

import skyward as sky
from skyward.integrations import JoblibPool, joblib_backend
from skyward.integrations.joblib import BatchWait
from tests.waiting import until


class Tracker:
    """The part of joblib's batch callback that skyward reads."""

    def __init__(self) -> None:
        self.status = TASK_PENDING
        self.parallel = SimpleNamespace(_aborting=False)
        self.looks = 0

    def get_status(self, timeout: float | None) -> Any:
        self.looks += 1
        return self.status


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with JoblibPool(sky.Local(), nodes=1, concurrency=2, logs=False) as pool:
        yield pool


def test_the_reader_is_woken_by_the_end_of_its_batch_and_hardly_ever_polls() -> None:
    waiting, mine, other = BatchWait(), Tracker(), Tracker()
    waiting.watch(mine)
    waiting.watch(other)

    def end(tracker: Tracker) -> None:
        tracker.status = TASK_DONE
        waiting.ended(tracker)

    timers = [threading.Timer(0.05, end, [other]), threading.Timer(0.1, end, [mine])]
    began = time.monotonic()
    for timer in timers:
        timer.start()
    while mine.get_status(timeout=None) == TASK_PENDING:
        assert time.monotonic() - began < 20
    # The timer may be late, and then each quarter of a second takes two looks.
    assert mine.looks <= 3 + (time.monotonic() - began) / 0.1, "instead of every 10 ms"


def test_an_abort_wakes_the_reader() -> None:
    waiting, mine, other = BatchWait(), Tracker(), Tracker()
    waiting.watch(mine)

    def abort() -> None:
        mine.parallel._aborting = True
        waiting.ended(other)

    timer = threading.Timer(0.02, abort)
    timer.start()
    assert mine.get_status(timeout=None) == TASK_PENDING
    assert mine.looks <= 2, "the abort woke it, or came first"
    timer.join()
    assert mine.get_status(timeout=None) == TASK_PENDING  # at once


def test_a_tracker_of_another_kind_is_left_alone() -> None:
    waiting = BatchWait()
    waiting.watch(None)
    waiting.watch(print)
    waiting.ended(None)


def test_a_batch_is_no_garbage_for_the_collector() -> None:
    waiting, tracker = BatchWait(), Tracker()
    waiting.watch(tracker)
    tracker.status = TASK_DONE
    tracker.get_status(timeout=None)
    gc.disable()
    try:
        gone = weakref.ref(tracker)
        del tracker
        assert gone() is None
    finally:
        gc.enable()


def test_waiting_uses_almost_no_processor_time(pool: sky.ComputePool) -> None:
    def switches() -> int:
        lines = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    with joblib_backend(pool):
        Parallel(batch_size=1)(delayed(time.sleep)(0.01) for _ in range(4))
        before = switches()
        Parallel(batch_size=1)(delayed(time.sleep)(1.0) for _ in range(2))
    assert switches() - before < 60, "looking every 10 ms are a hundred"


def test_a_timeout_comes_in_time(pool: sky.ComputePool, tmp_path: Path) -> None:
    def hold(path: str) -> None:
        until(Path(path).exists, 60)

    path = tmp_path / "go"
    with joblib_backend(pool):
        began = time.monotonic()
        with pytest.raises(multiprocessing.TimeoutError):
            Parallel(timeout=1.0)(delayed(hold)(str(path)) for _ in range(2))
        assert 1.0 <= time.monotonic() - began < 20
    path.touch()
