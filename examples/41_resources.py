"""Calls that say what they need: processors, memory, GPUs, or several nodes, whichever are free.

python examples/41_resources.py
"""

from __future__ import annotations

import os

import skyward as sky


@sky.compute(memory_gib=0.1)
def train(learning_rate: float) -> str:
    info = sky.instance_info()
    assert info is not None
    return f"lr={learning_rate} on node {info.node}"


@sky.compute
def wait_for(name: str) -> str:
    sky.event(name).wait()
    return "the first call has ended"


def main() -> None:
    with sky.ComputePool(sky.Local(), nodes=2, concurrency=2) as pool:
        print("two nodes, any:", train(0.3) @ pool.any(2))

        # Each training takes two nodes. The scheduler finds them, so nobody places the sweep by hand.
        for values in pool.map(train.with_options(nodes=2), [0.1, 0.01]):
            print("a training:", values)

        # A node of sky.Local() has its equal part of this machine. More than half of that fits only once.
        cpus = 0.6 * len(os.sched_getaffinity(0)) / 2
        node = pool.node(0)
        first = node.submit(wait_for("go").with_options(cpus=cpus))
        second = node.submit(train(0.03).with_options(cpus=cpus))
        print("the second call", second.why_waiting)
        pool.event("go").set()
        print(first.result(), "and the second ran:", second.result())

        try:
            train(1.0).with_options(gpus=64) >> pool
        except sky.errors.UsageError as error:
            print("refused:", error)


if __name__ == "__main__":
    main()
