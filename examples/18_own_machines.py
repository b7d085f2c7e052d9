"""The same program on machines of your own: name them, or name none to try it here.

python examples/18_own_machines.py gpu1 me@10.0.0.2:2222
"""

from __future__ import annotations

import sys

import skyward as sky


@sky.compute
def who() -> str:
    info = sky.instance_info()
    assert info is not None
    return f"node {info.node} of {info.total_nodes} is {info.hostname}"


@sky.compute
def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    hosts = sys.argv[1:]
    # The one line that differs. Names, addresses and aliases are those that `ssh` knows.
    provider = sky.SSH(hosts=hosts) if hosts else sky.Local()
    with sky.ComputePool(provider, nodes=len(hosts) or 2) as pool:
        for line in who() @ pool:
            print(line)
        print("mean:", mean([1.0, 2.0, 6.0]) >> pool)


if __name__ == "__main__":
    main()
