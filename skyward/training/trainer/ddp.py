"""Data-parallel training: one model on every rank, each with its share of every batch."""

from __future__ import annotations

from typing import Any

from ...errors import UsageError
from ..agree import Ranks, ranks_of_this_process
from ..arguments import DDPTrainingArguments
from .trainer import Trainer

__all__ = ["DDPTrainer"]


class DDPTrainer(Trainer):
    """A `Trainer` in a process group. Rank 0 reads the data and hands every rank its batches; with
    `DDPTrainingArguments(dispatch_batches=False)` every rank reads its own.

    Raises: UsageError where there is no process group.
    """

    def __init__(self, model: Any = None, args: DDPTrainingArguments | None = None, **options: Any) -> None:
        super().__init__(model, args or DDPTrainingArguments(), **options)

    def _make_ranks(self) -> Ranks:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "DDPTrainer: torch.distributed is not initialized; call init_process_group, or use "
                "@sky.integrations.torch"
            )
        return ranks_of_this_process()

    def get_process_groups(self) -> dict[str, Any]:
        """Of all ranks, whose models are replicas."""
        import torch.distributed as dist

        return {"ddp_group": dist.group.WORLD}
