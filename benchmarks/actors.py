"""Actors beside those of Ray: a lone call, calls that are sent without waiting, and inference in batches.

    .make/bench/bin/python benchmarks/actors.py

`make bench` makes that environment. Both run on this machine, and their rounds alternate, so that the noise of the
machine meets both alike. Both limit numpy in the model to one thread, as Ray does by default. Without Ray only skyward
is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import skyward as sky

WARM_UP = 50
WIDTH = 512
"""Length of an input of the model, in numbers."""
BATCH = 32
WAIT_S = 0.01


class Counter:
    """Object whose calls do nothing but count."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


class Layer:
    """Model of one layer. It is about as fast for 32 inputs as for one, like many on a GPU."""

    def __init__(self) -> None:
        self.weights = np.random.default_rng(0).random((WIDTH, WIDTH), dtype=np.float32)

    def infer(self, inputs: list[Any]) -> list[Any]:
        return list(np.tanh(np.stack(inputs) @ self.weights))


Round = Callable[[int], dict[str, float]]
"""Function that measures one round of some calls of each kind. Returns microseconds, or calls per second."""


def measure(
    call: Callable[[], Any], send: Callable[[], Any], infer: Callable[[Any], Any], get: Callable[[list[Any]], Any]
) -> Round:
    """Make the round of one peer.

    Args:
        call: Makes a lone call, and waits for its value.
        send: Sends a call.
        infer: Sends an input to the model.
        get: Waits for the values of calls that were sent.
    """
    array = np.ones(WIDTH, dtype=np.float32)
    for _ in range(WARM_UP):
        call()
    get([infer(array) for _ in range(WARM_UP)])

    def rate(send_one: Callable[[], Any], count: int) -> float:
        began = time.perf_counter()
        get([send_one() for _ in range(count)])
        return count / (time.perf_counter() - began)

    def measure_round(count: int) -> dict[str, float]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return {
            "a lone call, p50, us": statistics.median(times) * 1e6,
            "calls sent without waiting, per second": rate(send, 4 * count),
            f"inputs of a model in batches of {BATCH}, per second": rate(lambda: infer(array), 2 * count),
        }

    return measure_round


@contextlib.contextmanager
def skyward() -> Iterator[Round]:
    class Model(Layer):
        @sky.batched(max_size=BATCH, wait_s=WAIT_S)
        def predict(self, inputs: list[Any]) -> list[Any]:
            return self.infer(inputs)

    with sky.ComputePool(sky.Local(), logs=False, console=False) as pool:
        counter: Any = sky.actor(Counter)() >> pool
        model: Any = sky.actor(concurrency=2 * BATCH, cpus=1)(Model)() >> pool

        def get(futures: list[Any]) -> list[Any]:
            return [future.result() for future in futures]

        yield measure(
            lambda: counter.add(1) >> pool, lambda: counter.add(1) > pool, lambda x: model.predict(x) > pool, get
        )


@contextlib.contextmanager
def ray() -> Iterator[Round]:
    import ray

    class Model(Layer):
        """Gathers calls as users of Ray's core write it; `serve.batch` needs Ray Serve."""

        def __init__(self) -> None:
            super().__init__()
            self.waiting: list[tuple[Any, asyncio.Future[Any]]] = []

        async def predict(self, x: Any) -> Any:
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self.waiting.append((x, future))
            if len(self.waiting) == BATCH:
                self.flush()
            elif len(self.waiting) == 1:
                loop.call_later(WAIT_S, self.flush)
            return await future

        def flush(self) -> None:
            waiting, self.waiting = self.waiting, []
            for (_, future), value in zip(waiting, self.infer([x for x, _ in waiting]) if waiting else [], strict=True):
                future.set_result(value)

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        counter = ray.remote(Counter).remote()
        model = ray.remote(max_concurrency=2 * BATCH)(Model).remote()
        yield measure(
            lambda: ray.get(counter.add.remote(1)),
            lambda: counter.add.remote(1),
            model.predict.remote,
            ray.get,
        )
    finally:
        ray.shutdown()


def report(rounds: dict[str, list[dict[str, float]]]) -> None:
    for row in rounds["skyward"][0]:
        figures = {name: statistics.median(measured[row] for measured in own) for name, own in rounds.items()}
        print(f"{row:55}" + "".join(f"{name:>10} {figure:9,.0f}" for name, figure in figures.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="lone calls in a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        runs = {"skyward": stack.enter_context(skyward())}
        with contextlib.suppress(ImportError):
            runs["Ray"] = stack.enter_context(ray())
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                rounds[name].append(run(options.count))
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, {options.rounds} rounds;", end=" ")
    print(f"load average {load:.2f} before, {os.getloadavg()[0]:.2f} after")
    report(rounds)


if __name__ == "__main__":
    main()
