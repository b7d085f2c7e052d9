"""Data-parallel training: one model on every rank, each with its share of every batch."""

from __future__ import annotations

from typing import Any

from ..arguments import DDPTrainingArguments
from .trainer import Trainer

__all__ = ["DDPTrainer"]


class DDPTrainer(Trainer):
    """A `Trainer` of the ranks of torch's process group; of one rank where there is none. Rank 0 reads the data and
    hands every rank its batches; with `DDPTrainingArguments(dispatch_batches=False)` every rank reads its own.

    Raises: UsageError where this is one of several processes by its environment, and there is no process group.
    """

    def __init__(self, model: Any = None, args: DDPTrainingArguments | None = None, **options: Any) -> None:
        super().__init__(model, args or DDPTrainingArguments(), **options)

    def get_process_groups(self) -> dict[str, Any]:
        """Of all ranks, whose models are replicas; none where this process is alone."""
        import torch.distributed as dist

        return {} if self.ranks.world_size == 1 else {"ddp_group": dist.group.WORLD}
