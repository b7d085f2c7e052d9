"""Map and reduce: every node takes its share of the data, and the results are joined here.

python examples/03_broadcast.py
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

import skyward as sky

TEXT = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light"""


@sky.compute
def count_words(text: str) -> Counter[str]:
    words = sky.shard(text.lower().replace(",", "").split())  # on node i of n: every n-th word, from the i-th on
    return Counter(words)


@sky.compute
@sky.stdout(only="head")  # what the other nodes print is dropped
def moments(data: NDArray[np.float64]) -> tuple[int, float, float]:
    mine = sky.shard(data)
    print(f"my share is {len(mine):,} of {len(data):,} numbers")
    return len(mine), float(mine.sum()), float((mine**2).sum())


@sky.compute
def who_writes() -> str:
    return "the head" if sky.is_head else "another node"  # one of all: the place for a file, a message, a plot


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=3) as pool:
        # `@` runs the same call on every node. The values come in the order of the nodes.
        counts = count_words(TEXT) @ pool
        print("words on each node:", [count.total() for count in counts])
        print("most frequent:", sum(counts, Counter()).most_common(3))

        # 16 MB: the array crosses to each node once. Sending it again costs next to nothing.
        data = np.random.default_rng(0).normal(loc=5, scale=2, size=2_000_000)
        parts = moments(data) @ pool
        n, total, squares = (sum(column) for column in zip(*parts, strict=True))
        mean = total / n
        print(f"mean {mean:.3f}, standard deviation {(squares / n - mean**2) ** 0.5:.3f}, of {n:,} numbers")

        print(who_writes() @ pool)


if __name__ == "__main__":
    main()
