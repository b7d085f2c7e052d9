"""Measures on a running pool. Each returns samples by name, in seconds unless the name says otherwise.

Sample names: "first", "memory_mib", "noop", "noop_main", "pipelined_per_s", "map/<chunk>", "copy", "in_first",
"in_repeat", "out_first", "out_repeat", "spread". "noop_cpu", "noop_main_cpu" and "pipelined_cpu" are the processor time
of one call, client and workers together.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import processes
import workloads
from peers import Peer

Samples = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of every measure. The defaults are those of published numbers."""

    seconds_per_loop: float = 1.0
    map_items: int = 100_000
    map_repeats: int = 2
    chunk_grid: tuple[int, ...] = (200, 1_000, 5_000, 12_500, 25_000, 50_000)
    array_bytes: int = 100_000_000
    array_samples: int = 3
    spread_bytes: int = 1_000_000_000
    spread_timeout_s: float = 120.0

    @property
    def spread_memory_bytes(self) -> int:
        """Return the memory of a pool of 4 that copies: array and pickle here and in each worker, and some reserve."""
        return 13 * self.spread_bytes


def first_result(peer: Peer) -> Samples:
    """Start the pool and wait for one result."""
    begin = time.perf_counter()
    peer.start()
    peer.result(peer.submit(workloads.noop))
    return {"first": [time.perf_counter() - begin]}


def warm_up(peer: Peer) -> None:
    """Make every worker run something, because only the first result includes the start."""
    peer.gather([peer.submit(workloads.noop) for _ in range(40)])


def idle_memory(baseline_mib: float) -> Samples:
    """Weigh all processes that run for this pool, less the client's weight before it.

    All descendants of the benchmark count, so detached daemons do too.
    """
    time.sleep(1.0)
    return {"memory_mib": [processes.pss_mib(processes.descendants(os.getppid())) - baseline_mib]}


def round_trips(peer: Peer, function: Callable[[], None], *, name: str, sizes: Sizes) -> Samples:
    """Make one call at a time: submit, wait, repeat."""
    count = _calls_in(lambda: peer.call(function), seconds=sizes.seconds_per_loop)
    samples: list[float] = []
    cpu = _Cpu()
    for _ in range(count):
        begin = time.perf_counter()
        peer.call(function)
        samples.append(time.perf_counter() - begin)
    return {name: samples, f"{name}_cpu": [cpu.used() / count]}


def pipelined(peer: Peer, *, sizes: Sizes) -> Samples:
    """Submit all the calls, then wait for all the results."""
    begin = time.perf_counter()
    peer.gather([peer.submit(workloads.noop) for _ in range(200)])
    rate = 200 / (time.perf_counter() - begin)
    count = _clamp(rate * sizes.seconds_per_loop, low=200, high=10_000)
    cpu = _Cpu()
    begin = time.perf_counter()
    peer.gather([peer.submit(workloads.noop) for _ in range(count)])
    elapsed = time.perf_counter() - begin
    return {"pipelined_per_s": [count / elapsed], "pipelined_cpu": [cpu.used() / count]}


def tiny_map(peer: Peer, *, tunes_chunks: bool, sizes: Sizes) -> Samples:
    """Map a tiny function over many items. A peer that takes a chunk size is measured at each size of the grid.

    The first map is not measured. Otherwise it would count for a peer with one chunk size, and for no other: a grid's
    best size is not its first.
    """
    items = range(sizes.map_items)
    expected = [workloads.tiny(item) for item in items]
    samples: Samples = {}
    peer.map(workloads.tiny, items, chunk=sizes.chunk_grid[0] if tunes_chunks else None)
    for chunk in sizes.chunk_grid if tunes_chunks else (None,):
        name = f"map/{chunk or 'auto'}"
        samples[name] = []
        for _ in range(sizes.map_repeats):
            begin = time.perf_counter()
            result = peer.map(workloads.tiny, items, chunk=chunk)
            samples[name].append(time.perf_counter() - begin)
            _check(result == expected, f"{name} returned something else than the serial loop")
    return samples


def arrays(peer: Peer, *, sizes: Sizes) -> Samples:
    """Send a large array as an argument and as a result, first a new one and then again, beside one copy of it.

    The receiver reads every page. The repeat passes the value of `Peer.put`: the same array, or for Ray and Dask the
    reference that their users keep.
    """
    samples: Samples = {name: [] for name in ("copy", "in_first", "in_repeat", "out_first", "out_repeat")}
    small = workloads.make_array(size_bytes=8_000, seed=0)
    peer.gather([peer.submit(workloads.touch, small) for _ in range(40)])  # the workers import numpy here
    for seed in range(1, sizes.array_samples + 1):
        processes.warm_memory(5 * sizes.array_bytes)
        _array_in(peer, samples, seed=seed, sizes=sizes)
        processes.warm_memory(5 * sizes.array_bytes)
        for name in ("out_first", "out_repeat"):
            samples[name].append(_array_out(peer, seed=seed, sizes=sizes))
    return samples


def _array_in(peer: Peer, samples: Samples, *, seed: int, sizes: Sizes) -> None:
    array = workloads.make_array(size_bytes=sizes.array_bytes, seed=seed)
    expected = workloads.touch(array)
    begin = time.perf_counter()
    array.copy()
    samples["copy"].append(time.perf_counter() - begin)

    begin = time.perf_counter()
    argument = peer.put(array)
    first = peer.call(workloads.touch, argument)
    samples["in_first"].append(time.perf_counter() - begin)

    begin = time.perf_counter()
    again = peer.call(workloads.touch, argument)
    samples["in_repeat"].append(time.perf_counter() - begin)
    _check(first == again == expected, "the array changed on its way in")


def _array_out(peer: Peer, *, seed: int, sizes: Sizes) -> float:
    begin = time.perf_counter()
    array, making_s = peer.result(peer.submit(workloads.build, sizes.array_bytes, seed))
    total = workloads.touch(array)
    elapsed: float = time.perf_counter() - begin - making_s
    expected = workloads.make_array(size_bytes=sizes.array_bytes, seed=seed)
    _check(total == workloads.touch(expected), "the array changed on its way out")
    return elapsed


def spread(peer: Peer, *, workers: int, sizes: Sizes) -> Samples:
    """Send one large array to every worker. The clock stops when all of them have read it."""
    array = workloads.make_array(size_bytes=sizes.spread_bytes, seed=1)
    expected = workloads.touch(array)
    processes.warm_memory(min(sizes.spread_memory_bytes, processes.available_memory_bytes() // 2))
    with tempfile.TemporaryDirectory(prefix="meet-") as folder:
        begin = time.perf_counter()
        results = peer.spread(workloads.meet, array, folder, workers, sizes.spread_timeout_s)
        elapsed = time.perf_counter() - begin
    _check(len({pid for pid, _ in results}) == workers, "two of the calls ran in one worker")
    _check(all(total == expected for _, total in results), "the array changed on its way")
    return {"spread": [elapsed]}


class _Cpu:
    """Processor seconds that this process and its descendants have used since this object was made."""

    def __init__(self) -> None:
        self._before = self._now()

    def used(self) -> float:
        return self._now() - self._before

    def _now(self) -> float:
        return processes.cpu_seconds([os.getpid(), *processes.descendants(os.getpid())])


def _calls_in(call: Callable[[], object], *, seconds: float) -> int:
    """Return how many calls fill that time, estimated from 20 calls, so that a slow peer does not take minutes."""
    begin = time.perf_counter()
    for _ in range(20):
        call()
    return _clamp(20 * seconds / (time.perf_counter() - begin), low=100, high=5_000)


def _clamp(value: float, *, low: int, high: int) -> int:
    return int(min(max(value, low), high))


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(f"wrong result: {otherwise}")
