"""Calls made by tasks over links that break, and large arguments over slow links."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import skyward as sky
from tests.channels import Relayed
from tests.waiting import lines_of

pytestmark = pytest.mark.slow


@pytest.fixture
def provider(tmp_path: Path) -> Relayed:
    return Relayed(folder=str(tmp_path / "relays"))


@contextmanager
def breaking(provider: Relayed, nodes: int) -> Iterator[None]:
    """Cut the links repeatedly, one after another."""
    stop = threading.Event()

    def run() -> None:
        number = 0
        while not stop.wait(0.4):
            provider.break_links(number % nodes)
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@sky.compute
def note(path: Path, number: int) -> int:
    with path.open("a") as file:
        file.write(f"{number}\n")
    return number


@sky.compute
def reverse(data: np.ndarray) -> np.ndarray:
    return data[::-1].copy()


def test_calls_of_tasks_survive_broken_links_and_none_runs_twice(provider: Relayed, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    with sky.ComputePool(provider, nodes=2, logs=False) as pool, breaking(provider, 2):
        target = pool.node(1)

        def parent() -> int:
            right = 0
            for number in range(40):
                data = np.arange(number, number + 200_000)
                right += (reverse(data) >> target)[-1] == number
                right += (note(path, number) >> target) == number
                time.sleep(0.02)
            return int(right)

        assert (sky.compute(parent)() > pool.node(0)).result(timeout=100) == 80
    assert lines_of(path) == [str(number) for number in range(40)]


def test_large_arguments_block_no_other_traffic(tmp_path: Path) -> None:
    provider = Relayed(folder=str(tmp_path / "relays"), delay_s=0.01)
    with sky.ComputePool(provider, nodes=2, concurrency=2, logs=False) as pool:
        target = pool.node(1)

        def parent() -> int:
            future = reverse(np.zeros(20_000_000)) > target  # 160 MB up, down, up and down
            count = 0
            while not future.done():
                assert note(tmp_path / "beside", count) >> target == count
                count += 1
            assert len(future.result()) == 20_000_000
            return count

        # On each of its four ways the large one could hold up one call, if calls waited for it. A busy machine may let
        # few calls end beside it, so it has several tries.
        counts = (sky.compute(parent)() >> pool.node(0) for _ in range(5))
        assert any(count > 8 for count in counts)


def test_values_and_graphs_of_tasks_survive_broken_links(provider: Relayed, tmp_path: Path) -> None:
    with sky.ComputePool(provider, nodes=2, concurrency=2, logs=False) as pool, breaking(provider, 2):
        target = pool.node(1)

        def parent() -> int:
            right = 0
            for number in range(20):
                put, kept = pool.put(np.arange(number, number + 200_000)), make(number).keep() >> target
                right += (first(put) >> target) == (first(kept) >> pool) == number
                right += int(kept.get()[0]) == int(put.get()[0]) == number
                right += (first(reverse(make(number))) >> pool) == number + 199_999
            return int(right)

        assert (sky.compute(parent)() > pool.node(0)).result(timeout=150) == 60


@sky.compute
def make(number: int) -> np.ndarray:
    return np.arange(number, number + 200_000)


@sky.compute
def first(data: np.ndarray) -> int:
    return int(data[0])
