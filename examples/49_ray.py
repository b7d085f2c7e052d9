"""Estimate pi with the tasks of Ray, on a Ray cluster that lives for one call.

python examples/49_ray.py
"""

from __future__ import annotations

import logging

import skyward as sky


@sky.compute
@sky.integrations.ray_cluster(object_store_gib=0.2)
def estimate_pi(tasks: int, points: int) -> tuple[float, int]:
    import numpy as np
    import ray

    ray.init(logging_level=logging.ERROR)  # no address: it connects to the cluster of this call

    @ray.remote
    def hits(seed: int) -> int:
        x, y = np.random.default_rng(seed).random((2, points))
        return int((x * x + y * y <= 1).sum())

    total = sum(ray.get([hits.remote(seed) for seed in range(tasks)]))
    return 4 * total / (tasks * points), sum(node["Alive"] for node in ray.nodes())


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        # `@` takes every node for the cluster. The function itself runs once, on its head.
        [(pi, nodes)] = estimate_pi(tasks=20, points=100_000) @ pool
        print(f"pi is about {pi:.2f}, by Ray on {nodes} nodes")


if __name__ == "__main__":
    main()
