"""Calls that hang in a device are stopped from outside, and the device is free again."""

from __future__ import annotations

import time

import pytest
import torch

import skyward as sky
from skyward.errors import GangHung, TaskTimeout
from tests.gpu.conftest import Device, Figures
from tests.waiting import until

pytestmark = pytest.mark.gpu

GIB = 2**30


def compute_for_ever(device: str) -> None:
    """Hang in C with the GIL held, on no line of Python: a long kernel that the host waits for."""
    if device == "cuda":
        held = torch.empty(GIB, dtype=torch.uint8, device=device)
        for _ in range(200):
            torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        torch.cuda.synchronize()
        del held
        return
    torch.linalg.svd(torch.randn(6000, 6000))


def free_gib(device: str) -> float:
    return torch.cuda.mem_get_info()[0] / GIB if device == "cuda" else 0.0


def test_a_call_that_hangs_in_a_kernel_times_out(pool: sky.ComputePool, device: Device, figures: Figures) -> None:
    before = sky.compute(free_gib)(device) >> pool
    began = time.perf_counter()
    with pytest.raises(TaskTimeout, match="compute_for_ever"):
        sky.compute(timeout_s=4)(compute_for_ever)(device) >> pool
    figures("seconds with a limit of 4", round(time.perf_counter() - began, 2))
    # The process and its memory are gone as soon as the driver has ended the kernel.
    until(lambda: (sky.compute(free_gib)(device) >> pool) > before - 0.9)
    figures("seconds until its memory is free", round(time.perf_counter() - began, 2))


def test_a_gang_that_hangs_in_a_kernel_shows_its_position(
    pool: sky.ComputePool, device: Device, figures: Figures
) -> None:
    sky.compute(sky.integrations.torch(free_gib))(device) >> pool  # torch is imported ahead

    @sky.compute(timeout_s=10)
    @sky.integrations.torch
    def stuck() -> None:
        compute_for_ever(device)

    began = time.perf_counter()
    with pytest.raises(TaskTimeout) as raised:
        stuck() >> pool
    figures("seconds with a limit of 10", round(time.perf_counter() - began, 2))
    told = "\n".join([str(raised.value), *raised.value.__notes__])
    assert "compute_for_ever" in told, told
    assert sky.compute(free_gib)(device) >> pool >= 0


@pytest.mark.limit(90)
def test_a_rank_missing_from_a_collective_is_named(
    two_nodes: sky.ComputePool, device: Device, figures: Figures
) -> None:
    """Use NCCL if there are two devices, else gloo."""

    @sky.compute(hang_timeout_s=8)
    @sky.integrations.torch
    def stay_away(seconds: float) -> None:
        import torch.distributed as dist

        tensor = torch.ones(1000, device=device)
        dist.all_reduce(tensor)
        if dist.get_rank() == 1:
            time.sleep(seconds)
        else:
            dist.all_reduce(tensor)
            tensor.sum().item()

    began = time.perf_counter()
    with pytest.raises(GangHung) as raised:
        stay_away(60.0) @ two_nodes
    figures("seconds with a limit of 8", round(time.perf_counter() - began, 2))
    figures("named", raised.value.ranks)
    assert tuple(raised.value.ranks) == (1,)
