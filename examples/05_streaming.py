"""Stream values out of a call, and into one, while it runs.

python examples/05_streaming.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import skyward as sky


@sky.compute
def training(epochs: int) -> Iterator[dict[str, float]]:
    loss = 1.0
    for epoch in range(epochs):
        loss *= 0.7
        time.sleep(0.05)
        yield {"epoch": epoch, "loss": round(loss, 3)}


@sky.compute
def numbers(log: Path) -> Iterator[int]:
    n = 0
    try:
        while True:
            yield n
            n += 1
    finally:
        log.write_text(f"stopped after {n}")


@sky.compute
def running_mean(values: Iterator[float]) -> Iterator[float]:
    total = 0.0
    for count, value in enumerate(values, start=1):
        total += value
        yield total / count


def readings() -> Iterator[float]:
    for value in (3.0, 5.0, 10.0, 2.0):
        print(f"  read {value}")
        yield value


def main() -> None:
    with sky.ComputePool(provider=sky.Local()) as pool:
        # A generator function: each value is here as soon as it is yielded.
        for report in training(4) >> pool:
            print(report)

        # Ask for no more and it stops, its `finally` included. It never runs more than 16 values ahead of you.
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            print("five of an endless stream:", list(islice(numbers(log) >> pool, 5)))
            deadline = time.monotonic() + 5
            while not log.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            print("and then:", "it stopped by itself" if log.exists() else "it is still running")

        # An argument annotated Iterator[T] is streamed in: the generator is advanced here, the loop runs there.
        print("means:", list(running_mean(readings()) >> pool))


if __name__ == "__main__":
    main()
