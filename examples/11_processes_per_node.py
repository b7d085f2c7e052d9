"""Several processes on each node: who is where, what they see, and how many threads they have.

python examples/11_processes_per_node.py
"""

from __future__ import annotations

import os

import skyward as sky


def who_am_i() -> dict[str, int]:
    """This process in torchrun's words; how many it has met, by a sum over all of them; its numeric threads."""
    import torch
    import torch.distributed as dist

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    total = torch.ones(())
    dist.all_reduce(total)
    return {name: int(os.environ[name]) for name in names} | {"met": int(total), "threads": torch.get_num_threads()}


def gather() -> list[dict[str, int]]:
    """Of every rank, in every rank. A broadcast itself returns one value for each node: that of its first rank."""
    import torch.distributed as dist

    everybody: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, who_am_i())
    return everybody


one_each = sky.compute(sky.integrations.torch(gather))
two_each = sky.compute(sky.integrations.torch(processes_per_node=2)(gather))
one_for_each_accelerator = sky.compute(sky.integrations.torch(processes_per_node="auto")(gather))


def show(title: str, ranks: list[dict[str, int]]) -> None:
    print(title)
    for rank in ranks:
        print(
            f"  rank {rank['RANK']} of {rank['WORLD_SIZE']}: number {rank['LOCAL_RANK']} of {rank['LOCAL_WORLD_SIZE']} "
            f"on node {rank['NODE_RANK']}, met {rank['met']}, threads {rank['threads']}"
        )


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        show("1 node x 2 processes (>>)", two_each() >> pool)
        show("2 nodes x 2 processes (@)", (two_each() @ pool)[0])
        show("2 nodes x 1 process (@)", (one_each() @ pool)[0])
        show('2 nodes x "auto" (@)', (one_for_each_accelerator() @ pool)[0])


if __name__ == "__main__":
    main()
