"""The same program on a Ray cluster that you have: name a command that leads to one of its machines, or none.

python examples/50_existing_ray.py kubectl exec -i head --
"""

from __future__ import annotations

import sys

import skyward as sky


@sky.compute
def where() -> str:
    info = sky.instance_info()
    assert info is not None
    return f"node {info.node} of {info.total_nodes}"


@sky.compute
def squares(start: int, stop: int) -> int:
    return sum(number * number for number in range(start, stop))


def main() -> None:
    shell = sys.argv[1:]
    # The one line that differs. An SSH host will do, too: sky.RayCluster("me@head").
    provider = sky.RayCluster(shell) if shell else sky.Local()
    with sky.ComputePool(provider, nodes=2, vcpus=1) as pool:
        print(*where() @ pool, sep="\n")
        print("sum:", sum(squares(10 * i, 10 * i + 10) >> pool for i in range(10)))


if __name__ == "__main__":
    main()
