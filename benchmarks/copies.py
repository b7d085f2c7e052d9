"""Processor time to move 100 MB between the program and a slot, in units of one `ndarray.copy()`.

    .make/bench/bin/python benchmarks/copies.py
    .make/bench/bin/python benchmarks/copies.py --rounds 15

The time of all processes counts, so the figures hold on a busy machine too. The receiver reads every page. The last
rows are the steps by which an array goes to several slots: a file in memory, and a mapping of it in each slot.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import processes
import workloads
import xxhash

import skyward as sky

if TYPE_CHECKING:
    from workloads import Array

SIZE = 100_000_000
Samples = dict[str, list[float]]
"""Processor milliseconds of each way, by its name."""


def main() -> None:
    """Print one row for each way to move the array."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=9)
    rounds = options.parse_args().rounds
    load = os.getloadavg()[0]
    samples: Samples = {}
    with sky.ComputePool(provider=sky.Local(), concurrency=4) as pool:
        warm_up(pool)
        for seed in range(1, rounds + 1):
            processes.warm_memory(5 * SIZE)
            measure(pool, workloads.make_array(size_bytes=SIZE, seed=seed), seed, samples)
    one_copy_ms = statistics.median(samples["ndarray.copy()"])
    print(f"processor time to move 100 MB, medians of {rounds} rounds; load average {load:.1f} at the start")
    for name, times_ms in samples.items():
        median_ms = statistics.median(times_ms)
        print(f"{name:42} {median_ms:6.1f} ms, {median_ms / one_copy_ms:5.2f} copies")


def warm_up(pool: Any) -> None:
    """Let every slot import numpy, and settle."""
    small = workloads.make_array(size_bytes=8_000, seed=0)
    for future in [sky.compute(workloads.touch)(small) > pool for _ in range(40)]:
        future.result()
    time.sleep(0.5)


def measure(pool: Any, array: Array, seed: int, samples: Samples) -> None:
    """Move the array in each way, once."""
    touch, make = sky.compute(workloads.touch), sky.compute(workloads.make_array)
    expected = workloads.touch(array)

    def note(name: str, move: Callable[[], Any], *, less_ms: float = 0.0) -> Any:
        time.sleep(0.1)  # what earlier calls left to do, such as a spare file, is done
        before = cpu_ms()
        value = move()
        samples.setdefault(name, []).append(cpu_ms() - before - less_ms)
        return value

    def check(total: Any) -> None:
        if total != expected:
            raise RuntimeError("the array changed on its way")

    def four() -> list[float]:
        with pool.put(array) as ref:
            return [future.result() for future in [touch(ref) > pool for _ in range(4)]]

    def future() -> float:
        return (touch(array) > pool).result()

    def out() -> float:
        return workloads.touch(make(size_bytes=SIZE, seed=seed) >> pool)

    note("ndarray.copy()", array.copy)
    check(note("in, a blocking call", lambda: touch(array) >> pool))
    check(note("in, a future", future))
    future()  # from the second time on it is a blob
    check(note("in, a future, the third time", future))
    making_ms = thread_ms(lambda: workloads.make_array(size_bytes=SIZE, seed=seed))
    check(note("out", out, less_ms=making_ms))
    array += 0.5  # new bytes, which no other round sends
    expected = workloads.touch(array)
    for total in note("put, and 4 calls with the Ref", four):
        check(total)
    fd = note("step: write a file in memory", lambda: written(array))
    note("step: hash", lambda: xxhash.xxh3_128_digest(array.data))
    note("step: map the file and read every page", lambda: mapped(fd))
    os.close(fd)


def cpu_ms() -> float:
    """Return the processor time of this process and all below it, with that of threads that have ended."""
    return 1e3 * sum(map(processes.all_cpu_seconds, [os.getpid(), *processes.descendants(os.getpid())]))


def thread_ms(call: Callable[[], Any]) -> float:
    """Return the processor time of a call."""
    before = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - before)


def written(array: Array) -> int:
    """Write an array to a new file in memory, and return its descriptor."""
    fd, data, at = os.memfd_create("copies"), memoryview(array).cast("B"), 0
    while at < data.nbytes:
        at += os.pwrite(fd, data[at : at + (1 << 20)], at)
    return fd


def mapped(fd: int) -> float:
    """Map a file as slots do, and read every page."""
    with mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE) as mapping:
        return float(np.frombuffer(mapping, dtype=np.uint8)[::4096].copy().sum())


if __name__ == "__main__":
    main()
