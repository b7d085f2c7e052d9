"""Lightning: a `Trainer` in each rank joins the process group that skyward opens, and starts no process of its own.

Lightning tries its cluster environments in a fixed order and takes the first that applies. Torchelastic's comes before
all others, also before Slurm's. The list is closed: only the user could pass another class, in `plugins=`. But ranks
are exactly what torchelastic's describes: processes that were started from outside with torchrun's variables. Each rank
therefore sets torchelastic's marker too. Without it Lightning would take its default environment. That one yields to
Slurm's if the client runs in a Slurm job, does not compare the trainer's size with the world's, and deletes WORLD_SIZE
after the first `fit`.
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


@dataclass(frozen=True, kw_only=True)
class LightningIntegration(TorchIntegration):
    """Run the function as the ranks of one world that Lightning's `Trainer` finds; use it bare or with options.

    `Trainer(strategy="ddp")` is enough: `num_nodes` and `devices` default to the numbers of the gang. Lightning refuses
    other numbers if their product is not the world size. Both `lightning` and `pytorch_lightning` work.

    `@ pool` starts ranks on all nodes, `>> pool` on one node. Outside a pool, and in `.local(...)`, the function is
    called as it is. Write the decorator below `@sky.compute`. If `sky.integrations.torch` is on the same function, the
    upper one opens the process group.

    Args:
        backend: "nccl", "gloo" or another backend of `init_process_group`. None: nccl if each rank of the node has a
            GPU of its own, otherwise gloo.
        processes_per_node: ranks on each node, >= 1. "auto" starts one per accelerator, at least one.
        returns: ranks whose values `@` returns as a list: "nodes" for the first of each node, "ranks" for all, "head"
            for rank 0 alone. `>>` returns the value of its first rank, or with "ranks" a list too.
        seed: in [0, 2**32). Seeds `random`, numpy and torch with the same value in every rank. None: leaves the
            generators as they are.
        timeout_s: seconds, > 0, that a collective waits for the other ranks. None: torch's default.

    Raises:
        UsageError: an option is out of range, or the decorated object is not a plain function.
        MissingDependency: in the rank: Lightning or torch is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not connect to each other.

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
        # Lightning reads the default of each Trainer argument from PL_TRAINER_<ARGUMENT>.
        chosen = {"PL_TRAINER_NUM_NODES": str(rank.nodes), "PL_TRAINER_DEVICES": str(rank.local_world_size)}
        return {
            **super().environment(rank),
            "TORCHELASTIC_RUN_ID": f"skyward-{rank.head_addr}:{rank.head_port}",
            **{name: value for name, value in chosen.items() if name not in os.environ},
        }

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        # The same library under two names. Importing the one that the user does not use would take seconds.
        if find_spec("pytorch_lightning") is None:
            load_framework("lightning", extra=self.extra)
        with super().session(rank):
            yield


lightning = decorator_of(LightningIntegration)
