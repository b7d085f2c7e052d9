"""JAX on the devices of a node: its view of them, its share of their memory, and ranks beside torch."""

from __future__ import annotations

import os
import traceback
from typing import Any

import pytest

import skyward as sky
from tests.gpu.conftest import Device, Figures

pytest.importorskip("jax")

pytestmark = pytest.mark.gpu


def trace_of_square(size: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((size, size), jnp.float32)
    trace = float(jnp.trace(matrix @ matrix))
    here = jax.local_devices()
    memory = here[0].memory_stats() or {}
    return {
        "platform": here[0].platform,
        "devices": len(here),
        "told": os.environ["JAX_LOCAL_DEVICE_COUNT"],
        "trace": trace,
        "in use": memory.get("bytes_in_use", 0),
        "peak": memory.get("peak_bytes_in_use", 0),
        "limit": memory.get("bytes_limit", 0),
        "preallocates": os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", ""),
    }


alone = sky.compute(sky.integrations.jax(trace_of_square))


def test_a_rank_has_all_devices_of_its_node(
    pool: sky.ComputePool, device: Device, count: int, figures: Figures
) -> None:
    found = alone(2048 if device == "cuda" else 256) >> pool
    size = 2048 if device == "cuda" else 256
    assert found["trace"] == size**2
    assert (found["platform"] == "gpu") == (device == "cuda")
    assert found["told"] == str(found["devices"]) == str(max(1, count))
    for name in ("in use", "peak", "limit"):
        figures(f"{name}, MiB", round(found[name] / 2**20))
    if device == "cuda":
        assert found["peak"] >= 2 * size * size * 4


def test_ranks_that_share_a_device_leave_each_other_memory(two_nodes: sky.ComputePool, count: int) -> None:
    """Run without collectives, which need a device for each rank."""
    preallocates = {each["preallocates"] for each in alone(256) @ two_nodes}
    assert preallocates == ({"false"} if count == 1 else {""})


@sky.compute
@sky.integrations.jax
def sum_of_ranks() -> float:
    import jax
    from jax.experimental.multihost_utils import process_allgather

    return float(process_allgather(jax.process_index()).sum())


def test_a_collective_of_ranks_that_share_a_device_says_what_to_do(two_nodes: sky.ComputePool, count: int) -> None:
    if count != 1:
        assert sum_of_ranks() @ two_nodes == [1.0, 1.0]
        return
    with pytest.raises(Exception, match="Duplicate GPU") as caught:
        sum_of_ranks() @ two_nodes
    assert "JAX_PLATFORMS=cpu" in "".join(traceback.format_exception(caught.value))


def test_torch_and_jax_share_a_rank(pool: sky.ComputePool, device: Device) -> None:
    @sky.compute
    @sky.integrations.torch
    @sky.integrations.jax
    def both() -> tuple[float, float]:
        import jax.numpy as jnp
        import torch

        ones = torch.ones(64, 64, device=device)
        torch.distributed.all_reduce(ones)
        return float((ones @ ones).trace()), float(jnp.trace(jnp.ones((64, 64)) @ jnp.ones((64, 64))))

    assert both() >> pool == (4096.0, 4096.0)
