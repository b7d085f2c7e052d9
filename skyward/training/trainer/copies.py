"""How the ranks of a pipeline lie: copies of the model side by side, each of as many ranks as there are stages."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from ..agree import RankFailure, Ranks

__all__ = ["Copies"]

T = TypeVar("T")


class Copies:
    """The ranks as the data sees them: one for each copy of the model, whose last stage speaks for it.

    Rank `copy * num_stages + stage`: 8 ranks with 4 stages are the copies 0-3 and 4-7, and {0,4}, {1,5}, {2,6}, {3,7}
    hold the same stage. It is a `Ranks` of `world_size` copies. All ranks make it, since it makes process groups.
    """

    def __init__(self, ranks: Ranks, num_stages: int) -> None:
        self._ranks, self.num_stages = ranks, num_stages
        self.world_size = ranks.world_size // num_stages
        self.rank, self.stage = divmod(ranks.rank, num_stages)
        self.local_rank = ranks.local_rank
        self.pipeline: Any = None
        """torch's process group of this copy's stages; None where there is one stage."""
        self.replicas: Any = None
        """torch's process group of the ranks with this stage; None where there is one copy."""
        if num_stages > 1:
            self.pipeline = self._groups([[copy * num_stages + stage for stage in range(num_stages)]
                                          for copy in range(self.world_size)])[self.rank]  # fmt: skip
        if self.world_size > 1:
            self.replicas = self._groups([[copy * num_stages + stage for copy in range(self.world_size)]
                                          for stage in range(num_stages)])[self.stage]  # fmt: skip

    def _groups(self, ranks: list[list[int]]) -> list[Any]:
        return [torch.distributed.new_group(rank) for rank in ranks]

    @property
    def copy_of_rank(self) -> tuple[int, ...]:
        """By rank, the number of the copy that it is in."""
        return tuple(rank // self.num_stages for rank in range(self._ranks.world_size))

    # As Ranks --------------------------------------------------------------------------------------------------------

    def exchange(self, value: T) -> list[T]:
        """What the last stage of each copy says. All ranks call it."""
        return self._ranks.exchange(value)[self.num_stages - 1 :: self.num_stages]

    def fail(self, failure: RankFailure) -> None:
        self._ranks.fail(failure)

    def flags(self, bits: int) -> int:
        return self._ranks.flags(bits)

    def share(self, value: T, *, source: int = 0) -> T:
        return self._ranks.share(value, source=source * self.num_stages + self.num_stages - 1)

    # What passes between them ----------------------------------------------------------------------------------------

    def sum_over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """In place."""
        if self.pipeline is not None:
            torch.distributed.all_reduce(value, group=self.pipeline)
        return value

    def average_gradients(self, stage: nn.Module) -> None:
        """Over the copies; buffers become those of the first, as in DistributedDataParallel."""
        if self.replicas is None:
            return
        gradients = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
        works = [torch.distributed.all_reduce(gradient, group=self.replicas, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()
        torch._foreach_div_(gradients, float(self.world_size))
        self._broadcast([buffer for buffer in stage.buffers() if buffer.numel()])

    def start_equal(self, stage: nn.Module) -> None:
        """All copies get the first one's parameters and buffers."""
        self._broadcast([*stage.parameters(), *stage.buffers()])

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self.replicas is None:
            return
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), src=self.stage, group=self.replicas)
