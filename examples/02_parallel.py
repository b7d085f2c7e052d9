"""Run calls in parallel: a few different ones together, or one function over many values.

python examples/02_parallel.py
"""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import as_completed

import skyward as sky


@sky.compute
def pause(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@sky.compute
def estimate_pi(seed: int, points: int) -> float:
    rng = random.Random(seed)
    inside = sum(rng.random() ** 2 + rng.random() ** 2 < 1 for _ in range(points))
    return 4 * inside / points


def square(n: int) -> int:
    return n * n


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2) as pool:  # 2 x 2 = 4 slots
        # A few calls: `&` joins them. The parentheses are needed, for `>>` binds tighter than `&`.
        started = time.perf_counter()
        values = (pause(0.4) & pause(0.3) & pause(0.2)) >> pool
        print(f"a group: {values} in {time.perf_counter() - started:.1f} s, not 0.9")

        # The same from a list; with stream=True the values come one by one, here as they are ready.
        calls = [pause(s) for s in (0.6, 0.1, 0.3)]
        print("as they end:", list(sky.gather(*calls, stream=True, ordered=False) >> pool))

        # Futures are the standard library's, and work with all it has for them.
        futures = [estimate_pi(seed, 20_000) > pool for seed in range(8)]
        estimates = [future.result() for future in as_completed(futures)]
        print(f"pi is about {sum(estimates) / len(estimates):.2f}")

        # One function over many values. The function need not be decorated.
        squares = pool.map(square, range(100_000))
        print(f"map: {len(squares):,} values, the last is {squares[-1]:,}")

        # imap reads its input only as its values are consumed, so the input may be endless.
        first = list(itertools.islice(pool.imap(square, itertools.count()), 5))
        print("imap:", first)

        # For code that was written for an executor:
        with pool.executor() as executor:
            print("executor:", sum(executor.map(square, range(10))))


if __name__ == "__main__":
    main()
