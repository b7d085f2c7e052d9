"""Integrations of several frameworks on one function: each has its world, and they do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyward as sky
from skyward.pool.pool import ComputePool


@pytest.fixture(scope="module")
def pool() -> Iterator[ComputePool]:
    with sky.ComputePool(sky.Local(), nodes=2) as pool:
        yield pool


def worlds() -> tuple[int, int]:
    """Return the sizes of torch's and JAX's worlds, counted by a collective in each."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from jax.experimental.multihost_utils import process_allgather

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones.item()), int(process_allgather(np.ones(1)).sum())


def worlds_and_workers() -> tuple[int, int, int]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    ones = strategy.run(lambda: tf.constant(1.0))
    return *worlds(), int(strategy.reduce("SUM", ones, axis=None))


def test_torch_and_jax_meet_side_by_side(pool: ComputePool) -> None:
    decorated = sky.integrations.torch(sky.integrations.jax(worlds))
    assert sky.compute(decorated)() @ pool == [(2, 2), (2, 2)]


def test_jax_and_torch_meet_side_by_side(pool: ComputePool) -> None:
    """Both ranks are on one node, because each node imports both frameworks for each order."""
    inner = sky.integrations.torch(processes_per_node=2)(worlds)
    decorated: Callable[[], Any] = sky.integrations.jax(processes_per_node=2, returns="ranks")(inner)
    ranks: Any = sky.compute(decorated)() >> pool
    assert ranks == [(2, 2), (2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["torch, tensorflow, keras", "keras, tensorflow, torch"])
def test_keras_on_jax_works_beside_torch_and_tensorflow(pool: ComputePool, order: str) -> None:
    """Both ranks are on one node, because each node imports all four frameworks for each order."""
    decorated: Callable[[], Any] = worlds_and_workers
    for name in reversed(order.split(", ")):
        returns = {"returns": "ranks"} if name == "tensorflow" else {}
        decorated = getattr(sky.integrations, name)(processes_per_node=2, **returns)(decorated)
    ranks: Any = sky.compute(decorated)() >> pool
    assert ranks == [(2, 2, 2), (2, 2, 2)]
