"""Functions that the pools run. They are importable, so that every peer may send them by name.

Modules that few of them use are imported inside: an idle worker's memory does not include numpy, which only the array
measures need, nor `pathlib`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# One float64 in every 4 KiB page: reading these proves that every page arrived, at almost no cost.
FLOATS_PER_PAGE = 512


def noop() -> None:
    """Do nothing, so that only the cost of the call is left."""


def tiny(number: int) -> int:
    """Do almost nothing, 100,000 times, so that only the cost of the map is left."""
    return number + 1


def run_chunk(function: Callable[[int], int], items: Iterable[int]) -> list[int]:
    """Apply `function` to each item, for peers whose map does not group small calls by itself."""
    return [function(item) for item in items]


def ray_actor_calls(one_by_one: int, at_once: int) -> tuple[list[float], float]:
    """Call an actor from inside a task of Ray, so that no client is between them.

    Returns:
        Seconds of each of the calls that were made one after the other, and seconds of all that were made at once.
    """
    import ray

    class Idle:
        def noop(self) -> None: ...

    actor = ray.remote(Idle).remote()
    took = []
    for _ in range(20 + one_by_one):
        begin = time.perf_counter()
        ray.get(actor.noop.remote())
        took.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    ray.get([actor.noop.remote() for _ in range(at_once)])
    return took[20:], time.perf_counter() - begin


class Sealed:
    """A list that Dask sends in one piece. It sends a bare list element by element (2 s for 100,000, not 0.03)."""

    def __init__(self, values: list[int]) -> None:
        self.values = values


def run_sealed_chunk(function: Callable[[int], int], items: Iterable[int]) -> Sealed:
    """Run a chunk for Dask, like `run_chunk`."""
    return Sealed(run_chunk(function, items))


def make_array(*, size_bytes: int, seed: int) -> Array:
    """Make an array of that size whose content depends on `seed`.

    Returns:
        (size_bytes // 8,) float64
    """
    import numpy as np

    array = np.arange(size_bytes // 8, dtype=np.float64)
    array += seed
    return array


def touch(array: Array) -> float:
    """Read one number of every page. array: (N,) float64."""
    return float(array[::FLOATS_PER_PAGE].sum())


def build(size_bytes: int, seed: int) -> tuple[Array, float]:
    """Make an array and return the seconds that took, so that the caller can subtract them."""
    begin = time.perf_counter()
    array = make_array(size_bytes=size_bytes, seed=seed)
    return array, time.perf_counter() - begin


def meet(array: Array, folder: str, expected: int, timeout_s: float) -> tuple[int, float]:
    """Read every page, then wait for `expected` workers to have done so: proves that all of them hold the array.

    Returns:
        This worker's process id and the sum of the numbers it read.

    Raises:
        TimeoutError: The others do not come.
    """
    from pathlib import Path

    total = touch(array)
    Path(folder, str(os.getpid())).touch()
    deadline = time.monotonic() + timeout_s
    while len(os.listdir(folder)) < expected:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(os.listdir(folder))} of {expected} workers got the array in {timeout_s:.0f} s")
        time.sleep(0.001)
    return os.getpid(), total


def nap(number: int, seconds: float) -> int:
    """Wait, as for a disk or a server, and return the call's number."""
    time.sleep(seconds)
    return number


def spin(number: int, seconds: float) -> int:
    """Use that much processor time, however often others interrupt, and return the call's number."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return number


def read_and_hold(array: Array, arrived: str, go: str) -> tuple[int, float]:
    """Read all of an array, report it by a file named after this process, and hold the array until `go` exists.

    Returns:
        This worker's process id and the sum of the numbers it read.
    """
    from pathlib import Path

    total = float(array.sum())
    Path(arrived, str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while not Path(go).exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return os.getpid(), total
