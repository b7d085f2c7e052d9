"""Tensors of a model on the ranks of a process group: a whole copy on each, or shards of `fully_shard` (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import UsageError
from ..parts import is_dtensor
from .tensors import exchanged, in_rounds

APART = 0.1
"""Largest difference between two ranks' steps, as a share of the steps. Copies of DDP are equal to the bit. Ranks that
train alone, on other rows, differ by about as much as they have moved."""
SAMPLE = 2**20
"""Number of parameters that are compared, unless a single tensor has more."""


class RankTensors:
    """Tensors that ranks exchange: rank 0 sends and receives those of `whole`, and gives the others their parts.

    All ranks call each method at the same time.

    Args:
        model: Model of this rank.

    Raises:
        UsageError: See `exchanged`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.own = exchanged(model, may_be_sharded=True)
        """Tensors of this rank."""
        self._is_sharded = any(map(is_dtensor, self.own.values()))
        self.whole: nn.Module = GatheredModel(model) if self._is_sharded and dist.get_rank() == 0 else model
        """Model that rank 0 exchanges: the given one, or a copy of it in the CPU's memory."""
        self._begin: torch.Tensor | None = None
        """Sample of the parameters when training began, until the ranks are known to train as one."""
        self._of_whole = exchanged(self.whole) if dist.get_rank() == 0 else {}

    def gather(self, names: Iterable[str]) -> None:
        """Bring the whole model of rank 0 up to date."""
        if not self._is_sharded:
            return
        with torch.no_grad():
            for name in names:
                tensor: Any = self.own[name].detach()
                value = tensor.full_tensor() if is_dtensor(tensor) else tensor
                if self._of_whole:
                    self._of_whole[name].copy_(value)

    def share(self, names: Iterable[str]) -> None:
        """Set the tensors of all ranks to those of the whole model of rank 0."""
        with torch.no_grad():
            for name in names:
                self._share(name, self.own[name].detach())

    def watch(self) -> None:
        """Remember where training begins, for `check_together`."""
        if not self._is_sharded:
            self._begin = self._sample()

    def check_together(self) -> None:
        """Check once, before parameters of rank 0 replace those of the others, that the ranks train as one.

        Raises:
            UsageError: They have moved apart since `watch`. All ranks raise it.
        """
        if self._begin is None:
            return
        moved, self._begin = self._sample() - self._begin, None
        of_first = moved.clone()
        dist.broadcast(of_first, src=0)
        is_apart = ((moved - of_first).norm() > APART * of_first.norm()).float()
        dist.all_reduce(is_apart, op=dist.ReduceOp.MAX)
        if is_apart.item():
            raise UsageError(
                "model: the ranks of its process group have trained apart, so they are not one worker; wrap the model "
                "in DistributedDataParallel, or give each worker a process group of its own, such as by a call for "
                "each node: `train() > pool.node(n)`"
            )

    def _sample(self) -> torch.Tensor:
        """Return the smallest trained tensors in a row, as float32. They have a gradient in each step, as all have."""
        trained = [self.own[name].detach() for name in in_rounds(self.own) if self.own[name].requires_grad]
        trained.sort(key=torch.Tensor.numel)
        totals = accumulate(tensor.numel() for tensor in trained)
        few = [tensor for tensor, total in zip(trained, totals, strict=True) if total <= SAMPLE] or trained[:1]
        return torch.cat([tensor.flatten().to(few[0].device, torch.float32) for tensor in few])

    def _share(self, name: str, tensor: Any) -> None:
        if not is_dtensor(tensor):
            if self._is_sharded and self._of_whole:
                tensor.copy_(self._of_whole[name])
            dist.broadcast(tensor, src=0)
            return
        from torch.distributed.tensor import distribute_tensor

        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
        if self._of_whole:
            value.copy_(self._of_whole[name])
        tensor.copy_(distribute_tensor(value, tensor.device_mesh, tensor.placements))


class GatheredModel(nn.Module):
    """Whole copies of a sharded model's tensors in the CPU's memory, under its names. It computes nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._copies = {
            name: nn.Parameter(_empty(parameter), requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point()
        }
        self._kept = {name: _empty(buffer) for name, buffer in model.named_buffers()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._copies.items()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._kept.items()


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
