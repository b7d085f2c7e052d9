"""Layout of a pipeline's ranks: copies of the model, each with one rank for every stage."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from ..agree import RankFailure, Ranks

T = TypeVar("T")


class Copies:
    """Ranks as the data sees them: a `Ranks` with one member for each copy of the model.

    The last stage of a copy represents it in exchanges. Rank `copy * num_stages + stage` holds that stage of that copy.
    8 ranks with 4 stages are the copies 0-3 and 4-7, and {0,4}, {1,5}, {2,6}, {3,7} hold the same stage. All ranks
    construct it together, because it makes process groups.
    """

    def __init__(self, ranks: Ranks, num_stages: int) -> None:
        self._ranks, self.num_stages = ranks, num_stages
        self.world_size = ranks.world_size // num_stages
        self.rank, self.stage = divmod(ranks.rank, num_stages)
        self.local_rank = ranks.local_rank
        self.pipeline: Any = None
        """Process group of this copy's stages. None: there is one stage."""
        self.replicas: Any = None
        """Process group of the ranks with this stage. None: there is one copy."""
        if num_stages > 1:
            self.pipeline = self._groups([[copy * num_stages + stage for stage in range(num_stages)]
                                          for copy in range(self.world_size)])[self.rank]  # fmt: skip
        if self.world_size > 1:
            self.replicas = self._groups([[copy * num_stages + stage for copy in range(self.world_size)]
                                          for stage in range(num_stages)])[self.stage]  # fmt: skip

    def _groups(self, ranks: list[list[int]]) -> list[Any]:
        # Every rank makes all groups, its own and the others': torch requires it.
        return [torch.distributed.new_group(rank) for rank in ranks]

    @property
    def copy_of_rank(self) -> tuple[int, ...]:
        """Number of the copy that each rank belongs to."""
        return tuple(rank // self.num_stages for rank in range(self._ranks.world_size))

    # As Ranks --------------------------------------------------------------------------------------------------------

    def exchange(self, value: T) -> list[T]:
        """Return the value of each copy's last stage. All ranks call it."""
        return self._ranks.exchange(value)[self.num_stages - 1 :: self.num_stages]

    def fail(self, failure: RankFailure) -> None:
        self._ranks.fail(failure)

    def flags(self, bits: int) -> int:
        return self._ranks.flags(bits)

    def share(self, value: T, *, source: int = 0) -> T:
        return self._ranks.share(value, source=source * self.num_stages + self.num_stages - 1)

    # Tensors ---------------------------------------------------------------------------------------------------------

    def sum_over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over this copy's stages, in place."""
        if self.pipeline is not None:
            torch.distributed.all_reduce(value, group=self.pipeline)
        return value

    def average_gradients(self, stage: nn.Module) -> None:
        """Average gradients over the copies. Buffers become those of the first copy, as in DistributedDataParallel."""
        if self.replicas is None:
            return
        gradients = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
        works = [torch.distributed.all_reduce(gradient, group=self.replicas, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()
        torch._foreach_div_(gradients, float(self.world_size))
        self._broadcast([buffer for buffer in stage.buffers() if buffer.numel()])

    def start_equal(self, stage: nn.Module) -> None:
        """Set parameters and buffers of all copies to those of the first one."""
        self._broadcast([*stage.parameters(), *stage.buffers()])

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self.replicas is None:
            return
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), src=self.stage, group=self.replicas)
