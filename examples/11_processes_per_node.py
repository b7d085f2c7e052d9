"""Several processes on each node: who is where, what they see, and how many threads they have.

python examples/11_processes_per_node.py
"""

from __future__ import annotations

import os
from typing import Literal

import skyward as sky


def who_am_i() -> dict[str, int]:
    """This process in torchrun's words; how many it has met, by a sum over all of them; its numeric threads."""
    import torch
    import torch.distributed as dist

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    total = torch.ones(())
    dist.all_reduce(total)
    return {name: int(os.environ[name]) for name in names} | {"met": int(total), "threads": torch.get_num_threads()}


def of_every_rank(processes_per_node: int | Literal["auto"]) -> sky.ComputeFunction[[], sky.RankValues[dict[str, int]]]:
    """Make the call return the values of all ranks. By default `@` returns that of the first rank of each node."""
    return sky.compute(sky.integrations.torch(processes_per_node=processes_per_node, returns="ranks")(who_am_i))


def show(title: str, ranks: list[dict[str, int]]) -> None:
    print(title)
    for rank in ranks:
        print(
            f"  rank {rank['RANK']} of {rank['WORLD_SIZE']}: number {rank['LOCAL_RANK']} of {rank['LOCAL_WORLD_SIZE']} "
            f"on node {rank['NODE_RANK']}, met {rank['met']}, threads {rank['threads']}"
        )


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        show("1 node x 2 processes (>>)", of_every_rank(2)() >> pool)
        show("2 nodes x 2 processes (@)", of_every_rank(2)() @ pool)
        show("2 nodes x 1 process (@)", of_every_rank(1)() @ pool)
        show('2 nodes x "auto" (@)', of_every_rank("auto")() @ pool)


if __name__ == "__main__":
    main()
