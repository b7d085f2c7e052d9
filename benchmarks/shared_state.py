"""Shared state beside an actor of Ray that holds the same: operations one after another, from inside a task.

    .make/bench/bin/python benchmarks/shared_state.py

`make bench` makes that environment. Both run on this machine, and their rounds alternate, so that the noise of the
machine meets both alike. Without Ray only skyward is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import skyward as sky

WARM_UP = 50
VALUE = {"loss": 0.5, "step": 10}

Times = dict[str, list[float]]
"""Seconds of each operation, by its name."""


def measure(operations: dict[str, Callable[[int], Any]], count: int) -> Times:
    """Call each operation one after another, and return how long each call took."""
    times: Times = {}
    for name, operation in operations.items():
        for number in range(WARM_UP):
            operation(number)
        times[name] = []
        for number in range(count):
            began = time.perf_counter()
            operation(number)
            times[name].append(time.perf_counter() - began)
    return times


def on_skyward(count: int) -> Times:
    counter, shared = sky.counter("bench"), sky.dict[int, Any]("bench")
    operations: dict[str, Callable[[int], Any]] = {
        "increment a counter": lambda _: counter.increment(),
        "set a key": lambda number: shared.set(number % 100, VALUE),
        "get a key": lambda number: shared.get(number % 100),
    }
    return measure(operations, count)


@contextlib.contextmanager
def skyward() -> Iterator[Callable[[int], Times]]:
    with sky.ComputePool(sky.Local(), logs=False, console=False) as pool:
        task = sky.compute(on_skyward)
        yield lambda count: task(count) >> pool


@contextlib.contextmanager
def ray() -> Iterator[Callable[[int], Times]]:
    import ray

    class State:
        def __init__(self) -> None:
            self.count = 0
            self.shared: dict[int, Any] = {}

        def increment(self) -> int:
            self.count += 1
            return self.count

        def set(self, key: int, value: Any) -> None:
            self.shared[key] = value

        def get(self, key: int) -> Any:
            return self.shared.get(key)

    def on_actor(state: Any, count: int) -> Times:
        operations: dict[str, Callable[[int], Any]] = {
            "increment a counter": lambda _: ray.get(state.increment.remote()),
            "set a key": lambda number: ray.get(state.set.remote(number % 100, VALUE)),
            "get a key": lambda number: ray.get(state.get.remote(number % 100)),
        }
        return measure(operations, count)

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        actor = ray.remote(State).remote()
        task = ray.remote(on_actor)
        yield lambda count: ray.get(task.remote(actor, count))
    finally:
        ray.shutdown()


def report(name: str, rounds: list[Times]) -> None:
    for operation in rounds[0]:
        medians = [statistics.median(times[operation]) for times in rounds]
        rates = [len(times[operation]) / sum(times[operation]) for times in rounds]
        p50_us = statistics.median(medians) * 1e6
        print(f"{name:8} {operation:20} p50 {p50_us:6.0f} us   best round {max(rates):7,.0f} operations/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="operations of each kind in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        runs = {"skyward": stack.enter_context(skyward())}
        with contextlib.suppress(ImportError):
            runs["Ray"] = stack.enter_context(ray())
        rounds: dict[str, list[Times]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                rounds[name].append(run(options.count))
    for name, measured in rounds.items():
        report(name, measured)


if __name__ == "__main__":
    main()
