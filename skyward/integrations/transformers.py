"""Hugging Face Transformers: `Trainer` in each rank trains, evaluates and saves as part of one world.

`Trainer` finds its world through Accelerate, so this extends Accelerate's integration by the tokenizers' threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from ..values.topology import Rank
from .accelerate import AccelerateIntegration
from .base import decorator_of, load_framework


@dataclass(frozen=True, kw_only=True)
class TransformersIntegration(AccelerateIntegration):
    """Run the function as the ranks of one world that Transformers' `Trainer` finds; use it bare or with options.

    `TrainingArguments` needs no settings for it, on GPUs or on the CPU. Gradients are averaged over all ranks. Each
    rank evaluates its part and gets the metrics of the whole, and rank 0 saves. `per_device_train_batch_size` counts
    the samples of one rank.

    `@ pool` starts ranks on all nodes, `>> pool` on one node. Outside a pool, and in `.local(...)`, the function is
    called as it is. Write the decorator below `@sky.compute`. If `sky.integrations.torch` is on the same function, the
    upper one opens the process group.

    Args:
        backend: "nccl", "gloo" or another backend of `init_process_group`. None: nccl if each rank of the node has a
            GPU of its own, otherwise gloo.
        processes_per_node: ranks on each node, >= 1. "auto" starts one per accelerator, at least one.
        returns: ranks whose values `@` returns as a list: "nodes" for the first of each node, "ranks" for all, "head"
            for rank 0 alone. `>>` returns the value of its first rank, or with "ranks" a list too.
        seed: in [0, 2**32). Seeds `random`, numpy and torch with the same value in every rank before the function is
            called, so that a model made from a config has the same initial weights everywhere. The trainer's own seed
            is `TrainingArguments(seed=...)`. None: leaves the generators as they are.
        timeout_s: seconds, > 0, that a collective waits for the other ranks. None: torch's default.

    Raises:
        UsageError: an option is out of range, or the decorated object is not a plain function.
        MissingDependency: in the rank: Transformers, Accelerate or torch is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not connect to each other.

    Example:
        >>> @transformers(seed=0)
        ... def fine_tune(model, arguments, data) -> float:
        ...     from transformers import Trainer
        ...     trainer = Trainer(model=model, args=arguments, train_dataset=data)
        ...     return trainer.train().training_loss
        >>> fine_tune.__name__
        'fine_tune'
    """

    name: ClassVar[str] = "transformers"
    extra: ClassVar[str] = "transformers"
    packages: ClassVar[tuple[str, ...]] = ("transformers", "accelerate", "torch")
    preload: ClassVar[tuple[str, ...]] = (*AccelerateIntegration.preload, "transformers.trainer")

    def environment(self, rank: Rank) -> dict[str, str]:
        """Return Accelerate's variables, and as many threads for the tokenizers (Rust, with rayon) as for torch.

        TOKENIZERS_PARALLELISM stays unset. The tokenizers then use their threads, and stop using them in a process that
        is forked from theirs, such as a worker of a data loader. "true" makes such a worker hang (seen with tokenizers
        0.23), and "false" makes the rank itself slow.
        """
        variables = super().environment(rank)
        if "RAYON_NUM_THREADS" not in os.environ:
            threads = variables.get("OMP_NUM_THREADS") or os.environ["OMP_NUM_THREADS"]
            variables["RAYON_NUM_THREADS"] = threads.partition(",")[0]  # OpenMP allows a list, rayon does not
        return variables

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        load_framework("transformers", extra=self.extra)
        with super().session(rank):
            yield


transformers = decorator_of(TransformersIntegration)
