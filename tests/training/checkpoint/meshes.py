"""A model whose parameters are DTensors over a mesh: tensor parallel, with replicas or with FSDP2 around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from skyward.training.checkpoint import ModelState, OptimizerState, StateComponent
from tests.training.checkpoint.states import Box, part

__all__ = ["Mlp", "components", "made", "trained"]


class Mlp(nn.Module):
    """Model x: (B, 6) -> (B, 4). It splits into 2 or 4 parts, and has a parameter that no mesh splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x))) * self.scale


def made(seed: int, *, dp: int = 1, tp: int = 1, fsdp: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the model on all dp x tp ranks: tensor-parallel over tp, and over dp replicated or sharded by FSDP2."""
    torch.manual_seed(seed)
    model = Mlp()
    if dp * tp > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if fsdp:
            fully_shard(model.up, mesh=mesh["dp"])
            fully_shard(model.down, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Return the losses of some steps, on the same batch on every rank."""
    losses = []
    for _ in range(steps):
        loss = model(torch.linspace(-1, 1, 24).reshape(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def components(model: nn.Module, optimizer: torch.optim.Optimizer, box: Box) -> list[StateComponent]:
    return [
        part("model", ModelState(model), "per_rank"),
        part("optimizer", OptimizerState(model, optimizer), "per_rank"),
        part("trainer", box, "global"),
    ]
