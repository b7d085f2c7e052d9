"""The program that `make pictures` records: a map over three nodes, watched on a terminal."""

from __future__ import annotations

import sys
import time

import skyward as sky


@sky.compute
def score(batch: int) -> float:
    until = time.monotonic() + 0.35
    total = 0.0
    while time.monotonic() < until:  # a little work for the load that the panel shows
        total += sum(n * n for n in range(2000))
        time.sleep(0.02)
    if batch % 5 == 3:
        print(f"batch {batch}: loss {2.3 / (1 + batch / 10):.3f}", flush=True)
    return total


def main() -> None:
    print("$ python train.py", flush=True)
    with sky.ComputePool(sky.Local(), nodes=3, console=True, name="train") as pool:
        scores = pool.map(score, range(42))
        print(f"{len(scores)} batches scored on {pool.nodes} nodes", flush=True)
        time.sleep(1)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
