"""Lightning: a `Trainer` in each rank finds the world that skyward has opened and starts no process of its own.

Lightning asks its cluster environments in turn whether they are at home, and takes the first: torchelastic's before
all others, also before Slurm's. The list is closed, a class of ours could only be passed by the user in `plugins=`.
Ours is exactly what that first one describes, processes that were started from outside with torchrun's variables, so
each rank has torchelastic's mark too. Without it Lightning takes its own default environment: that one falls behind
Slurm's where the client runs in a Slurm job, does not compare the trainer's size with the world's, and deletes
WORLD_SIZE after the first `fit`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from ..values.topology import Rank
from .base import decorator_of, load_framework
from .torch import TorchIntegration

__all__ = ["LightningIntegration", "lightning"]


@dataclass(frozen=True, kw_only=True)
class LightningIntegration(TorchIntegration):
    """Runs the function as the ranks of one world that Lightning's `Trainer` finds; use it bare or with options.

    `Trainer(num_nodes=..., devices=...)` has the numbers of the gang where it is not given others, so
    `Trainer(strategy="ddp")` is enough; numbers whose product is not the world's size are refused by Lightning. It
    holds for `lightning` and for `pytorch_lightning`. All that `sky.integrations.torch` says holds here too, its
    options among it; where both stand on a function, the process group is opened once, by the upper one.

    Args:
        backend: "nccl", "gloo" or what else `init_process_group` takes; None: nccl where each rank of the node has a
            GPU of its own, gloo otherwise.
        processes_per_node: ranks on each node, >= 1; "auto" is one for each accelerator, at least one.
        seed: in [0, 2**32); seeds `random`, numpy and torch alike in every rank. None: they are not touched.
        timeout_s: seconds, > 0, that a collective waits for the other ranks; None: torch's own.

    Raises:
        UsageError: an option is not legal, or what is decorated cannot be.
        MissingDependency: in the rank: Lightning or torch is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not meet.

    Example:
        >>> @lightning(seed=0)
        ... def train(model, data) -> int:
        ...     from lightning.pytorch import Trainer
        ...     trainer = Trainer(max_epochs=1)
        ...     trainer.fit(model, data)
        ...     return trainer.world_size
        >>> train.__name__
        'train'
    """

    name: ClassVar[str] = "lightning"
    extra: ClassVar[str] = "lightning"
    packages: ClassVar[tuple[str, ...]] = ("lightning", "torch")
    preload: ClassVar[tuple[str, ...]] = (*TorchIntegration.preload, "lightning.pytorch")

    def environment(self, rank: Rank) -> dict[str, str]:
        # Lightning reads PL_TRAINER_<ARGUMENT> as the default of that argument.
        chosen = {"PL_TRAINER_NUM_NODES": str(rank.nodes), "PL_TRAINER_DEVICES": str(rank.local_world_size)}
        return {
            **super().environment(rank),
            "TORCHELASTIC_RUN_ID": f"skyward-{rank.head_addr}:{rank.head_port}",
            **{name: value for name, value in chosen.items() if name not in os.environ},
        }

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        # The same library under two names; to import the one that the user does not use would take seconds.
        if find_spec("pytorch_lightning") is None:
            load_framework("lightning", extra=self.extra)
        with super().session(rank):
            yield


lightning = decorator_of(LightningIntegration)
