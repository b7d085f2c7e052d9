"""Process groups on GPUs: NCCL if each rank has its own device, gloo if ranks share one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import skyward as sky
from skyward.errors import TaskError, UsageError
from tests.gpu.conftest import Device, Figures

pytestmark = pytest.mark.gpu

MIB = 2**20


def reduced(device: str, mib: int) -> dict[str, Any]:
    """Return the all_reduce of ones on this rank, and the duration of the third one."""
    tensor = torch.ones(mib * MIB // 4, device=device)
    seconds = 0.0
    for _ in range(3):
        tensor.fill_(1)
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return {
        "backend": dist.get_backend_config(),
        "world": dist.get_world_size(),
        "is_right": bool((tensor == dist.get_world_size()).all()),
        "device": torch.cuda.current_device() if device == "cuda" else -1,
        "gb_per_s": mib * MIB / seconds / 1e9,
    }


def mean_of_gradients(device: str) -> float:
    """Return the mean that DistributedDataParallel computes: ranks have gradients of 1, 2, ..., world size."""
    model = torch.nn.Linear(1, 1, bias=False).to(device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    (wrapped(torch.ones(1, 1, device=device)) * (dist.get_rank() + 1)).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.item()


reduced_by_one = sky.compute(sky.integrations.torch(reduced))
reduced_by_all = sky.compute(sky.integrations.torch(processes_per_node="auto")(reduced))
reduced_by_two = sky.compute(sky.integrations.torch(processes_per_node=2)(reduced))
gradients_of_all = sky.compute(sky.integrations.torch(processes_per_node="auto")(mean_of_gradients))


def test_one_rank_has_nccl(pool: sky.ComputePool, device: Device, figures: Figures) -> None:
    began = time.perf_counter()
    found = reduced_by_one(device, 64) >> pool
    figures("seconds with the start of the rank", round(time.perf_counter() - began, 2))
    assert ("nccl" if device == "cuda" else "gloo") in found["backend"]
    assert found["is_right"]


def test_a_rank_on_each_device_reduces_by_nccl(
    pool: sky.ComputePool, device: Device, count: int, figures: Figures
) -> None:
    found = reduced_by_all(device, 256 if device == "cuda" else 4) >> pool
    assert ("nccl" if device == "cuda" else "gloo") in found["backend"]
    assert found["world"] == max(1, count)
    assert found["is_right"]
    figures("ranks", found["world"])
    figures("all_reduce GB/s", round(found["gb_per_s"], 1))


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_share_a_device_reduce_by_gloo(
    pool: sky.ComputePool, two_nodes: sky.ComputePool, device: Device, count: int, nodes: int, figures: Figures
) -> None:
    """Two ranks run on one node, or on two nodes that divide the devices of this machine."""
    found = reduced_by_two(device, 16) >> pool if nodes == 1 else (reduced_by_one(device, 16) @ two_nodes)[0]
    assert ("nccl" if count >= 2 else "gloo") in found["backend"]
    assert (found["world"], found["is_right"]) == (2, True)
    figures("all_reduce GB/s", round(found["gb_per_s"], 2))


def test_gradients_are_averaged(pool: sky.ComputePool, two_nodes: sky.ComputePool, device: Device, count: int) -> None:
    world = max(1, count)
    assert gradients_of_all(device) >> pool == pytest.approx((world + 1) / 2)
    of_two = 2 * max(1, count // 2)
    assert gradients_of_all(device) @ two_nodes == pytest.approx([(of_two + 1) / 2] * 2)


@sky.compute
@sky.integrations.torch(backend="nccl")
def never_begins() -> None:
    raise AssertionError


def test_nccl_for_ranks_that_share_a_device_is_refused(two_nodes: sky.ComputePool, count: int) -> None:
    if count <= 1:
        with pytest.raises(UsageError, match="share a GPU" if count else "has no GPU"):
            never_begins() @ two_nodes


@sky.compute
@sky.integrations.torch
def pipelined(folder: str, device: str) -> float:
    """Train two stages, one in each rank. Returns the last loss."""
    from skyward.training import PipelineTrainer, TrainingArguments

    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.int64))
    trainer = PipelineTrainer(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)),
        TrainingArguments(
            folder, max_steps=30, learning_rate=0.1, logging_steps=30, disable_tqdm=True, use_cpu=device == "cpu"
        ),
        model_splitter=lambda model, _: list(model.children()),
        num_stages=2,
        compute_loss_func=torch.nn.functional.cross_entropy,
        train_dataset=data if dist.get_rank() == 0 else None,
    )
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


def test_stages_of_a_pipeline_need_a_device_each(
    two_nodes: sky.ComputePool, tmp_path: Path, device: Device, count: int
) -> None:
    if count == 1:
        with pytest.raises(UsageError, match=r"num_stages=2: gloo, .* use_cpu=True"):
            pipelined(str(tmp_path), device) @ two_nodes
    else:
        assert (pipelined(str(tmp_path), device) @ two_nodes)[0] < 0.7


def test_a_rank_that_fails_on_its_device_is_reported_and_stops_the_others(
    two_nodes: sky.ComputePool, device: Device, figures: Figures
) -> None:
    @sky.compute
    @sky.integrations.torch
    def fail() -> None:
        tensor = torch.ones(1, device=device)
        if dist.get_rank() == 1:
            torch.zeros(2, device=device)[torch.tensor([5], device=device)].sum().item()  # CUDA: a failed assertion
        dist.all_reduce(tensor)
        tensor.item()

    began = time.perf_counter()
    with pytest.raises((RuntimeError, IndexError, TaskError)) as raised:
        fail() @ two_nodes
    figures("seconds", round(time.perf_counter() - began, 2))
    assert any("rank 1" in note for note in raised.value.__notes__)
    assert (reduced_by_one(device, 1) @ two_nodes)[0]["is_right"], "the next gang has the device"
