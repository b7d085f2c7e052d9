"""A pool that grows while calls wait, gives idle nodes back, and rests without any until the next call.

python examples/39_elastic_pool.py
"""

from __future__ import annotations

import time

import skyward as sky


@sky.compute
def simulate(seed: int) -> int:
    time.sleep(1.0)
    return seed * seed


@sky.compute
def greet() -> str:
    info = sky.instance_info()
    assert info is not None
    return f"node {info.node} of {info.total_nodes}"


def show(event: sky.events.Event) -> None:
    if isinstance(event, sky.events.PoolScaled):  # event.reason says why
        print(f"nodes: {event.before} -> {event.nodes}", flush=True)


def main() -> None:
    # On rented machines leave idle_timeout_s out: 300 s. A new node must pay, so they grow for minutes of work.
    with sky.ComputePool(sky.Local(), nodes=(1, 3), idle_timeout_s=3, on_event=show) as pool:
        print("squares:", pool.map(simulate, range(9)))
        while pool.nodes > 1:  # it is idle now
            time.sleep(0.1)
        pool.scale(2)  # two nodes from now on, until the pool is idle
        print(greet() @ pool)

    # min=0: nothing is there, and nothing costs money, until the first call.
    with sky.ComputePool(sky.Local(), nodes=(0, 2), idle_timeout_s=2) as pool:
        print("first call:", greet() >> pool)

    # A pool of a fixed size that is used only now and then.
    with sky.ComputePool(sky.Local(), nodes=2, idle_timeout_s=1) as pool:
        rested = next(event for event in pool.events() if isinstance(event, sky.events.PoolScaled))
        print("resting with", rested.nodes, "nodes; the next call:", greet() @ pool)


if __name__ == "__main__":
    main()
