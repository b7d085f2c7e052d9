"""Accelerate's integration: `Accelerator()` in real ranks. Only the ranks import it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import UsageError
from skyward.integrations.accelerate import AccelerateIntegration
from skyward.integrations.base import integrate, integrations_of
from skyward.pool.pool import ComputePool
from skyward.testing import IntegrationSuite
from skyward.values.topology import Rank
from tests.few_modules import lean_frameworks


@pytest.fixture(scope="module")
def accelerate_pool() -> Iterator[ComputePool]:
    """Open one pool for the whole file, so that its nodes import the framework once."""
    # `accelerate launch` sets these for FSDP. Only `shard_as_on_gpus` reads them.
    image = sky.Image(env={"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"})
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2, image=image) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool(accelerate_pool: ComputePool) -> ComputePool:
    return accelerate_pool


class TestAccelerateConforms(IntegrationSuite):
    decorator = staticmethod(sky.integrations.accelerate)
    framework = "accelerate"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, accelerate_pool: ComputePool) -> ComputePool:
        return accelerate_pool

    @staticmethod
    def is_initialized() -> bool:
        from torch.distributed import is_initialized

        return is_initialized()

    @staticmethod
    def place() -> tuple[int, int]:
        from accelerate import Accelerator

        accelerator = Accelerator()
        return accelerator.process_index, accelerator.num_processes

    @staticmethod
    def total(value: float) -> float:
        import torch
        from accelerate import Accelerator

        summed: float = Accelerator().reduce(torch.tensor(value, dtype=torch.float64), reduction="sum").item()
        return summed


def test_options_are_shown_on_the_function() -> None:
    @sky.integrations.accelerate(backend="gloo", processes_per_node=2, seed=7, timeout_s=60)
    def train() -> None: ...

    (integration,) = integrations_of(train)
    assert integration == AccelerateIntegration(backend="gloo", processes_per_node=2, seed=7, timeout_s=60)


def test_an_option_out_of_its_range_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="seed=-1: @accelerate"):
        sky.integrations.accelerate(seed=-1)


def test_the_accelerator_is_one_of_the_world_on_the_cpu(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.accelerate(processes_per_node=2)
    def world() -> list[Any]:
        from accelerate import Accelerator

        state = Accelerator().state
        mine = [state.process_index, state.local_process_index, state.num_processes]
        return [*mine, state.backend, state.device.type, state.distributed_type.value]

    assert world() @ pool == [
        [0, 0, 4, "gloo", "cpu", "MULTI_CPU"],
        [2, 0, 4, "gloo", "cpu", "MULTI_CPU"],
    ]


Trained = tuple[list[float], list[float], str]


def train(batch_size: int, *, fsdp: bool = False) -> Trained:
    """Train. Returns the losses of 5 steps, all weights after them, and how the weights are kept."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator()
    if fsdp:
        shard_as_on_gpus(accelerator)
    x = torch.linspace(-1, 1, 40 * 3, dtype=torch.float64).reshape(40, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True) ** 2)
    network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(data, batch_size=batch_size))
    losses = []
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    kept = type(next(model.parameters())).__name__
    weights = [w.full_tensor() if fsdp else w for w in model.parameters()]
    return losses, torch.cat([w.flatten() for w in weights]).tolist(), kept


def test_a_training_loop_averages_gradients(pool: ComputePool) -> None:
    function = sky.compute(sky.integrations.accelerate(seed=3)(train))
    first, second = function(4) @ pool
    assert first == second
    losses, weights, _ = first
    # One process with the doubled batch makes the same steps.
    alone_losses, alone_weights, _ = function(8) >> pool
    assert len(alone_losses) == 5
    np.testing.assert_allclose(losses, alone_losses, rtol=1e-12)
    np.testing.assert_allclose(weights, alone_weights, rtol=1e-9)


def test_metrics_are_gathered_once_for_each_row_though_the_last_batch_is_uneven(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.accelerate
    def gather() -> tuple[list[int], int]:
        import torch
        from accelerate import Accelerator
        from torch.utils.data import DataLoader, TensorDataset

        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(13)), batch_size=4))
        seen = []
        steps = 0
        for (rows,) in loader:
            seen += accelerator.gather_for_metrics(rows).tolist()
            steps += 1
        return seen, steps

    assert gather() @ pool == [(list(range(13)), 2)] * 2


def shard_as_on_gpus(accelerator: Any) -> None:
    """Shard as on GPUs.

    Accelerate takes an FSDP configuration only on accelerators. On the CPU it stays with DDP silently. So its own code
    for the other case runs here, on gloo.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    assert accelerator.state.distributed_type is DistributedType.MULTI_CPU
    accelerator.state.distributed_type = DistributedType.FSDP
    # It reads the variables that the pool's image has.
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()


def test_an_fsdp_configuration_of_the_environment_shards_the_weights(pool: ComputePool) -> None:
    function = sky.compute(sky.integrations.accelerate(seed=3)(train))
    first, second = function(4, fsdp=True) @ pool
    assert first == second
    losses, weights, kept = first
    same_losses, same_weights, kept_by_ddp = (function(4) @ pool)[0]
    assert (kept, kept_by_ddp) == ("DTensor", "Parameter")
    np.testing.assert_allclose(losses, same_losses, rtol=1e-12)
    np.testing.assert_allclose(weights, same_weights, rtol=1e-9)


@dataclass(frozen=True, kw_only=True)
class Decided(AccelerateIntegration):
    def environment(self, rank: Rank) -> dict[str, str]:
        return {**super().environment(rank), "ACCELERATE_USE_CPU": "yes"}


def test_the_users_choice_of_the_cpu_stays(pool: ComputePool) -> None:
    def variable() -> str:
        return os.environ["ACCELERATE_USE_CPU"]

    assert sky.compute(sky.integrations.accelerate(variable))() @ pool == ["true", "true"]
    assert sky.compute(integrate(variable, Decided()))() @ pool == ["yes", "yes"]


# Stacks -----------------------------------------------------------------------------------------------------------


def watched(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return the group before and after the inner integration, and the function's value."""

    def run() -> Any:
        import torch.distributed as dist

        before = id(dist.group.WORLD)
        value = function()
        return before == id(dist.group.WORLD), value == before

    run.__dict__.update(function.__dict__)
    return run


def group() -> int:
    import torch.distributed as dist

    return id(dist.group.WORLD)


def test_stacked_with_torch_the_group_is_opened_once(pool: ComputePool) -> None:
    decorators = sky.integrations.accelerate, sky.integrations.torch(backend="gloo")
    for outer, inner in (decorators, decorators[::-1]):
        stacked = sky.compute(sky.stdout(only="head")(outer(watched(inner(group)))))
        assert stacked() @ pool == [(True, True)] * 2


@pytest.mark.parametrize("options", [{"timeout_s": 60}, {"backend": "fake"}])
def test_an_option_too_late_for_the_group_is_refused(pool: ComputePool, options: dict[str, Any]) -> None:
    function = sky.compute(sky.integrations.accelerate(sky.integrations.torch(**options)(group)))
    with pytest.raises(UsageError, match=f"{next(iter(options))}=.* @torch .*topmost"):
        function() @ pool


# Failures ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_raises_is_the_error_though_the_others_wait_in_backward(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.accelerate
    def fail() -> None:
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        if accelerator.process_index == 1:
            raise ValueError("bad batch")
        accelerator.backward(model(torch.ones(1)).sum())

    begin = time.monotonic()
    with pytest.raises(ValueError, match="bad batch") as raised:
        fail() @ pool
    assert time.monotonic() - begin < 60
    assert "Rank 1 of 2 failed first" in "\n".join(raised.value.__notes__)
