"""Lightning's integration: a `Trainer` in each rank finds the existing world. Only the ranks import Lightning."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.integrations.base import integrations_of
from skyward.integrations.lightning import LightningIntegration
from skyward.pool.pool import ComputePool
from skyward.testing import IntegrationSuite
from skyward.values.launch import Integration
from skyward.values.topology import Rank
from tests.few_modules import lean_frameworks

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(scope="module")
def lightning_pool() -> Iterator[ComputePool]:
    """Open one pool for the whole file, so that its nodes import the framework once.

    A Slurm job's variables must not matter.
    """
    image = sky.Image(env={"SLURM_NTASKS": "7", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "3"})
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2, image=image) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool(lightning_pool: ComputePool) -> ComputePool:
    return lightning_pool


class TestLightningConforms(IntegrationSuite):
    decorator = staticmethod(sky.integrations.lightning)
    framework = "lightning"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, lightning_pool: ComputePool) -> ComputePool:
        return lightning_pool

    @staticmethod
    def is_initialized() -> bool:
        from torch.distributed import is_initialized

        return is_initialized()

    @staticmethod
    def place() -> tuple[int, int]:
        from lightning.pytorch import Trainer

        trainer = Trainer(**QUIET)
        return trainer.global_rank, trainer.world_size

    @staticmethod
    def total(value: float) -> float:
        import torch
        from lightning.pytorch import Trainer

        summed = Trainer(**QUIET).strategy.reduce(torch.tensor(value, dtype=torch.float64), reduce_op="sum")
        return float(summed)

    def test_a_missing_framework_is_named_with_its_extra(
        self, integration: Integration, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pytorch_lightning", None)  # either name will do
        super().test_a_missing_framework_is_named_with_its_extra(integration, monkeypatch)


# Options and environment ------------------------------------------------------------------------------------------


def test_options_are_shown_on_the_function() -> None:
    @sky.integrations.lightning(backend="gloo", processes_per_node=2, seed=7, timeout_s=60)
    def train() -> None: ...

    (integration,) = integrations_of(train)
    assert integration == LightningIntegration(backend="gloo", processes_per_node=2, seed=7, timeout_s=60)


def test_the_size_of_the_trainer_is_a_default_that_the_user_may_override(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node=3,
        node_rank=1,
        nodes=2,
        head_addr="10.0.0.1",
        head_port=21_000,
        local_addr="10.0.0.4",
    )
    names = ("PL_TRAINER_NUM_NODES", "PL_TRAINER_DEVICES")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    environment = LightningIntegration().environment(rank)
    assert [environment[name] for name in names] == ["2", "4"]
    monkeypatch.setenv("PL_TRAINER_DEVICES", "1")
    environment = LightningIntegration().environment(rank)
    assert [environment.get(name) for name in names] == ["2", None]


# The trainer ------------------------------------------------------------------------------------------------------


def make_module(library: Any, on_step: Callable[[], None] = lambda: None) -> Any:
    import torch

    class Parabola(library.LightningModule):  # type: ignore[misc]  # mypy does not read lightning
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any) -> Any:
            on_step()
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.network(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.losses.append(self.trainer.callback_metrics["loss"].item())

        def validation_step(self, batch: Any) -> None:
            self.log("rows", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

        def test_step(self, batch: Any) -> None:
            self.log("mean", batch[0].mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Parabola().double()


def make_loader(batch_size: int) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.linspace(-1, 1, 40 * 3, dtype=torch.float64).reshape(40, 3)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True) ** 2), batch_size=batch_size)


def fit(batch_size: int, **options: Any) -> tuple[list[float], list[float], int]:
    """Fit. Returns the losses of all ranks in each step, all weights at the end, and the steps."""
    import torch

    library = import_module("lightning.pytorch")
    model = make_module(library)
    trainer = library.Trainer(**QUIET, max_epochs=5, log_every_n_steps=1, **options)
    trainer.fit(model, make_loader(batch_size))
    return model.losses, torch.cat([w.detach().flatten() for w in model.parameters()]).tolist(), trainer.global_step


def test_a_fit_on_two_nodes_averages_gradients(pool: ComputePool) -> None:
    function = sky.compute(sky.integrations.lightning(seed=3)(fit))
    # Lightning's sampler shuffles: only a batch of all rows has the same rows in both worlds.
    first, second = function(20, strategy="ddp", num_nodes=2, devices=1) @ pool
    assert first == second
    losses, weights, steps = first
    alone_losses, alone_weights, _ = function(40) >> pool
    assert steps == 5
    np.testing.assert_allclose(losses, alone_losses, rtol=1e-9)
    np.testing.assert_allclose(weights, alone_weights, rtol=1e-9)
    # Two ranks on one node must agree as well.
    neighbours = sky.compute(sky.integrations.lightning(seed=3, processes_per_node=2)(fit))
    assert neighbours(20, strategy="ddp", num_nodes=1, devices=2) >> pool == first


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_ranks_are_skywards_and_no_process_is_launched(pool: ComputePool, name: str) -> None:
    @sky.compute
    @sky.integrations.lightning(processes_per_node=2)
    def places() -> list[Any]:
        library = import_module(name)
        children: list[int] = []

        def count_children() -> None:
            children.append(len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))

        trainer = library.Trainer(**QUIET, max_steps=1, strategy="ddp")
        trainer.fit(make_module(library, count_children), make_loader(4))
        info = sky.instance_info()
        assert info is not None
        assert (trainer.global_rank, trainer.local_rank, trainer.world_size) == (
            info.rank,
            info.local_rank,
            info.world_size,
        )
        environment = trainer.strategy.cluster_environment
        mine = [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size, trainer.num_nodes]
        return [*mine, environment.creates_processes_externally, children]

    assert places() @ pool == [[0, 0, 0, 4, 2, True, [0]], [2, 0, 1, 4, 2, True, [0]]]


def test_after_a_fit_the_same_world_validates_tests_and_fits_again(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.lightning
    def measure() -> tuple[float, float, int]:
        library = import_module("lightning.pytorch")
        model, loader = make_module(library), make_loader(4)
        library.Trainer(**QUIET, max_epochs=1, strategy="ddp").fit(model, loader)
        trainer = library.Trainer(**QUIET, max_epochs=1, strategy="ddp")
        trainer.fit(model, loader)
        (validated,) = trainer.validate(model, loader, verbose=False)
        (tested,) = trainer.test(model, loader, verbose=False)
        return validated["rows"], round(tested["mean"], 9), trainer.global_step

    assert measure() @ pool == [(40.0, 0.0, 5)] * 2


def test_numbers_that_differ_from_the_worlds_are_refused(pool: ComputePool) -> None:
    function = sky.compute(sky.integrations.lightning(fit))
    with pytest.raises(ValueError, match=r"does not match the world size \(2\)"):
        function(20, strategy="ddp", num_nodes=3, devices=1) @ pool


def test_fabric_finds_the_world_too(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.lightning
    def place() -> tuple[int, int, float]:
        import torch
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", strategy="ddp", num_nodes=2, devices=1)
        fabric.launch()
        return fabric.global_rank, fabric.world_size, fabric.all_reduce(torch.ones(1), reduce_op="sum").item()

    assert place() @ pool == [(0, 2, 2.0), (1, 2, 2.0)]


# The group, stacks and failures -----------------------------------------------------------------------------------


def test_the_group_exists_before_the_fit_and_is_destroyed_at_the_end(pool: ComputePool) -> None:
    def watched(function: Callable[[], bool]) -> Callable[[], tuple[bool, bool]]:
        def run() -> tuple[bool, bool]:
            import torch.distributed as dist

            same = function()
            return same, dist.is_initialized()

        run.__dict__.update(function.__dict__)
        return run

    @sky.compute
    @watched
    @sky.integrations.lightning
    def train() -> bool:
        import torch.distributed as dist

        before = dist.group.WORLD
        fit(20, strategy="ddp")
        return before is dist.group.WORLD

    assert train() @ pool == [(True, False)] * 2


def test_stacked_with_torch_it_is_one_world(pool: ComputePool) -> None:
    decorators = sky.integrations.lightning(seed=3), sky.integrations.torch
    for outer, inner in (decorators, decorators[::-1]):
        first, second = sky.compute(sky.stdout(only="head")(outer(inner(fit))))(20, strategy="ddp") @ pool
        assert first == second


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_raises_in_a_step_is_the_error_though_the_others_wait_for_it(
    pool: ComputePool, failing: int
) -> None:
    @sky.compute
    @sky.integrations.lightning
    def fail() -> None:
        library = import_module("lightning.pytorch")
        steps: list[int] = []

        def on_step() -> None:
            steps.append(1)
            if len(steps) == 3 and os.environ["RANK"] == str(failing):
                raise ValueError("bad batch")

        library.Trainer(**QUIET, max_epochs=1, strategy="ddp").fit(make_module(library, on_step), make_loader(4))

    begin = time.monotonic()
    with pytest.raises(ValueError, match="bad batch") as raised:
        fail() @ pool
    assert time.monotonic() - begin < 60
    assert f"Rank {failing} of 2 failed first" in "\n".join(raised.value.__notes__)
