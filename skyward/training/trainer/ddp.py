"""Data-parallel training: every rank holds the model and trains on its share of each batch."""

from __future__ import annotations

from typing import Any

from ..arguments import DDPTrainingArguments
from .trainer import Trainer


class DDPTrainer(Trainer):
    """`Trainer` for data-parallel ranks, of which rank 0 reads the data and sends every rank its batches.

    The ranks are those of torch's process group; without one it trains alone. With
    `DDPTrainingArguments(dispatch_batches=False)` every rank reads its own batches.

    Args:
        model: as for `Trainer`.
        args: settings; None: `DDPTrainingArguments()`.
        **options: as for `Trainer`. Ranks other than 0 may pass no data sets.

    Raises:
        UsageError: as for `Trainer`.

    Example:
        Train on all nodes of a pool::

            @sky.integrations.torch
            @sky.compute
            def train():
                DDPTrainer(make_model(), DDPTrainingArguments("out"), train_dataset=make_data()).train()

            with sky.ComputePool(provider=sky.AWS(), nodes=4) as pool:
                train() @ pool
    """

    def __init__(self, model: Any = None, args: DDPTrainingArguments | None = None, **options: Any) -> None:
        super().__init__(model, args or DDPTrainingArguments(), **options)

    def get_process_groups(self) -> dict[str, Any]:
        """Return "ddp_group", the group of all ranks; nothing if this process is alone."""
        import torch.distributed as dist

        return {} if self.ranks.world_size == 1 else {"ddp_group": dist.group.WORLD}
