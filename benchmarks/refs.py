"""Values that stay on nodes beside Ray's object store: a large array and small values, passed by reference.

    .make/bench/bin/python benchmarks/refs.py

`make bench` makes that environment. Both run on this machine with two workers, and their rounds alternate, so that the
noise of the machine meets both alike. Without Ray only skyward is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import processes
import workloads

import skyward as sky

Times = dict[str, list[float]]
"""Seconds of each operation, by its name."""
SMALL = {"loss": 0.5, "step": 10}
CHAIN = 100


@dataclass(frozen=True)
class Peer:
    """Calls of one library. `call` runs a function of `workloads` or this file and waits for its value."""

    put: Callable[[Any], Any]
    call: Callable[..., Any]
    chain: Callable[[int], Any]
    """Function that runs so many calls, each with the value of the one before, and returns the last value."""


def same(value: Any) -> Any:
    return value


def add(number: int, more: int) -> int:
    return number + more


@contextlib.contextmanager
def skyward() -> Iterator[Peer]:
    def chain(count: int) -> int:
        call = sky.compute(add)(0, 1)
        for _ in range(count - 1):
            call = sky.compute(add)(call, 1)
        return call >> pool

    with sky.ComputePool(sky.Local(), concurrency=2, logs=False, console=False) as pool:
        yield Peer(
            put=pool.put,
            call=lambda function, *args: sky.compute(function)(*args) >> pool,
            chain=chain,
        )


@contextlib.contextmanager
def ray() -> Iterator[Peer]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    remote = {function: ray.remote(function) for function in (workloads.touch, same, add)}

    def chain(count: int) -> Any:
        reference = remote[add].remote(0, 1)
        for _ in range(count - 1):
            reference = remote[add].remote(reference, 1)
        return ray.get(reference)

    try:
        yield Peer(put=ray.put, call=lambda function, *args: ray.get(remote[function].remote(*args)), chain=chain)
    finally:
        ray.shutdown()


def measure(peer: Peer, seed: int, *, size_bytes: int, repeats: int) -> Times:
    """Run each operation of one round. The seed makes its array a new one."""
    times: Times = {}

    def timed(name: str, operation: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        value = operation()
        times.setdefault(name, []).append(time.perf_counter() - begin)
        return value

    array = workloads.make_array(size_bytes=size_bytes, seed=seed)
    expected = workloads.touch(array)
    processes.warm_memory(4 * size_bytes)
    large = [timed("100 MB: put", lambda: peer.put(array))]
    assert timed("100 MB: first call", lambda: peer.call(workloads.touch, *large)) == expected
    for _ in range(3):  # both workers may take their turn
        peer.call(workloads.touch, *large)
    for _ in range(repeats):
        assert timed("100 MB: the same again", lambda: peer.call(workloads.touch, *large)) == expected
    large.clear()  # the next round puts another array
    small = peer.put(SMALL)
    for _ in range(10 * repeats):
        timed("small value: put", lambda: peer.put(SMALL))
        assert timed("small value: call", lambda: peer.call(same, small)) == SMALL
    assert timed(f"chain of {CHAIN} calls", lambda: peer.chain(CHAIN)) == CHAIN
    return times


def warm_up(peer: Peer) -> None:
    """Let the workers start and import numpy."""
    for _ in range(20):
        peer.call(workloads.touch, workloads.make_array(size_bytes=8_000, seed=0))
    peer.chain(CHAIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=10, help="calls with the same array in a round")
    parser.add_argument("--mb", type=int, default=100, help="size of the array")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        peers = {"skyward": stack.enter_context(skyward())}
        with contextlib.suppress(ImportError):
            peers["Ray"] = stack.enter_context(ray())
        for peer in peers.values():
            warm_up(peer)
        rounds: dict[str, list[Times]] = {name: [] for name in peers}
        for seed in range(options.rounds):
            for name, peer in peers.items():
                rounds[name].append(measure(peer, seed, size_bytes=options.mb * 10**6, repeats=options.repeats))
    report(rounds)


def report(rounds: dict[str, list[Times]]) -> None:
    """Print the median of the rounds' medians, and their ratios: the median of the ratios of each round."""
    print(f"{'p50, ms':26}" + "".join(f"{name:>12}" for name in rounds) + f"{'ratio':>10}   (range)")
    for operation in rounds["skyward"][0]:
        p50 = {name: [1e3 * statistics.median(times[operation]) for times in rows] for name, rows in rounds.items()}
        row = f"{operation:26}" + "".join(f"{statistics.median(values):12.3f}" for values in p50.values())
        if "Ray" in p50:
            ratios = sorted(ours / theirs for ours, theirs in zip(p50["skyward"], p50["Ray"], strict=True))
            row += f"{statistics.median(ratios):10.2f}   ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(row)


if __name__ == "__main__":
    main()
