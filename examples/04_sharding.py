"""Divide data between nodes with sky.shard: aligned, shuffled, of equal length, for the types you have.

python examples/04_sharding.py
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import skyward as sky


@sky.compute
def letters(data: list[str]) -> list[str]:
    return sky.shard(data)


@sky.compute
def aligned(x: NDArray[np.int64], y: NDArray[np.int64]) -> tuple[int, bool]:
    # Several arrays are divided by one rule, shuffled or not: the pairs stay pairs. All nodes shuffle alike.
    mine_x, mine_y = sky.shard(x, y, shuffle=True, seed=7)
    return len(mine_x), bool((mine_y == mine_x * 10).all())


@sky.compute
def equal_lengths(data: list[int]) -> list[int]:
    # For collective operations: every node gets the same number of items, the remainder is left out.
    return sky.shard(data, drop_last=True)


@sky.compute
def rows(frame: pd.DataFrame) -> list[str]:
    return list(sky.shard(frame)["city"])


@sky.compute
def unequal(x: list[int], y: list[int]) -> None:
    sky.shard(x, y)


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=3) as pool:
        # Node i of n gets every n-th item from the i-th on; the type stays what it was.
        print("list:", letters(list("abcdefg")) @ pool)

        x = np.arange(1_000)
        print("arrays, shuffled:", aligned(x, x * 10) @ pool)
        print("equal lengths:", [len(part) for part in equal_lengths(list(range(100))) @ pool])

        frame = pd.DataFrame({"city": ["Oslo", "Lima", "Pune", "Bonn"], "rain_mm": [760, 16, 720, 790]})
        print("data frame:", rows(frame) @ pool)

        # A call on one node has nothing to share with anybody: it gets everything.
        print("on one node:", letters(list("abcdefg")) >> pool)

        try:
            unequal([1, 2, 3], [1, 2]) @ pool
        except ValueError as error:
            print("unequal lengths:", error)

    print("without a pool:", letters.local(list("abcdefg")))


if __name__ == "__main__":
    main()
