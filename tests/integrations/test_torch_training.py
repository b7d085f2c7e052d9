"""Training under PyTorch's integration: DistributedDataParallel, FSDP2 and the data loaders on our ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import skyward as sky
from skyward.errors import SlotLost
from skyward.pool.pool import ComputePool
from tests.few_modules import lean_frameworks
from tests.waiting import until


@pytest.fixture(scope="module")
def pool() -> Iterator[ComputePool]:
    """Open one pool for the whole file, so that its nodes import torch once."""
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2) as pool:
        yield pool


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float64), torch.tensor(y)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()


def losses_of(model: torch.nn.Module, rank: int, ranks: int, *, steps: int, batch: int) -> list[float]:
    """Return the loss of each step over the whole batch of `batch * ranks` rows, of which this rank has its part."""
    x, y = digits()
    loss_of = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps + 1):
        begin = (step * ranks + rank) * batch
        optimizer.zero_grad()
        loss = loss_of(model(x[begin : begin + batch]), y[begin : begin + batch])
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(whole)
        losses.append(whole.item() / ranks)
    return losses


def alone() -> list[float]:
    """Train in one process with the double batch."""
    torch.manual_seed(5)
    return losses_of(network(), 0, 1, steps=10, batch=64)


def test_ten_steps_on_two_ranks_equal_those_of_one_process_with_the_double_batch(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch(seed=5)
    def train() -> list[float]:
        model = torch.nn.parallel.DistributedDataParallel(network())
        return losses_of(model, dist.get_rank(), dist.get_world_size(), steps=10, batch=32)

    first, second = train() @ pool
    assert first == second
    assert first[-1] < 0.75 * first[0]
    np.testing.assert_allclose(first, alone(), rtol=1e-6)


def test_fully_sharded_parameters_train_like_whole_ones(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch(seed=5)
    def train() -> tuple[list[float], list[int], list[int], dict[str, Any]]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.fsdp import fully_shard

        model = network()
        whole = [parameter.numel() for parameter in model.parameters()]
        for layer in model.children():
            if list(layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
        losses = losses_of(model, dist.get_rank(), dist.get_world_size(), steps=10, batch=32)
        own = [parameter.to_local().numel() for parameter in model.parameters()]  # type: ignore[attr-defined]
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = dict(get_model_state_dict(model, options=options))
        return losses, whole, own, {name: value.numpy() for name, value in state.items()}

    (first, whole, own, state), (second, _, others, nothing) = train() @ pool
    assert first == second
    np.testing.assert_allclose(first, alone(), rtol=1e-6)
    assert own == others == [number // 2 for number in whole]  # each rank holds half of every parameter
    assert [value.size for value in state.values()] == whole
    assert nothing == {}  # the whole is on the head only


def test_a_distributed_sampler_gives_each_rank_its_rows(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch(processes_per_node=2)
    def rows() -> list[list[int]]:
        data = TensorDataset(torch.arange(103))
        sampler: DistributedSampler[Any] = DistributedSampler(data, seed=1)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen.append([int(row) for (batch,) in loader for row in batch])
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, seen)
        return [[row for rank in gathered for row in rank[epoch]] for epoch in range(2)]

    (first, second), again = rows() @ pool
    assert [first, second] == again
    assert len(first) == len(second) == 104  # one row twice: the ranks are of equal length
    assert set(first) == set(second) == set(range(103))
    assert first != second


class Squares(Dataset[torch.Tensor]):
    """Data set whose rows say which process made them."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.folder is not None:
            (self.folder / str(os.getpid())).touch()
        return torch.tensor([float(index) ** 2, float(os.getpid())])


def test_data_loaders_may_have_their_own_processes(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def load() -> tuple[float, bool, list[int]]:
        loader = iter(DataLoader(Squares(), batch_size=4, num_workers=2))
        values = torch.cat([next(loader) for _ in range(4)])
        pids = {int(pid) for pid in values[:, 1]}
        return values[:, 0].sum().item(), os.getpid() in pids, sorted(pids)

    results = load() @ pool
    for total, is_own, pids in results:
        assert total == sum(i**2 for i in range(16))
        assert not is_own
        assert len(pids) == 2
    until(lambda: not any(psutil.pid_exists(pid) for _, _, pids in results for pid in pids))


@pytest.mark.parametrize("how", ["killed", "cancelled", "another failed"])
def test_the_processes_of_a_data_loader_end_with_their_rank(pool: ComputePool, tmp_path: Path, how: str) -> None:
    @sky.compute
    @sky.integrations.torch
    def load() -> None:
        loader = iter(DataLoader(Squares(tmp_path), batch_size=1, num_workers=2, persistent_workers=True))
        for _ in range(4):
            next(loader)
        dist.barrier()
        if how == "killed" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "another failed" and dist.get_rank() == 0:
            raise LookupError
        time.sleep(600)

    if how == "cancelled":
        future = load() > pool
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        assert future.cancel()
    else:
        with pytest.raises(SlotLost if how == "killed" else LookupError):
            load() @ pool
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == (2 if how == "cancelled" else 4)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
