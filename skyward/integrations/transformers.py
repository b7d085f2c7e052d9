"""Hugging Face Transformers: `Trainer` in each rank trains, evaluates and saves as one world.

`Trainer` finds its world through Accelerate, so this is Accelerate's integration, with the tokenizers' threads.
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

__all__ = ["TransformersIntegration", "transformers"]


@dataclass(frozen=True, kw_only=True)
class TransformersIntegration(AccelerateIntegration):
    """Runs the function as the ranks of one world that Transformers' `Trainer` finds; use it bare or with options.

    `TrainingArguments` needs nothing for it, on GPUs and on the CPU: gradients are averaged over all ranks, each
    rank evaluates its part and has the metrics of the whole, rank 0 saves. `per_device_train_batch_size` is that of
    a rank. All that `sky.integrations.torch` says holds here too, its options among it; where both stand on a
    function, the process group is opened once, by the upper one.

    Args:
        backend: "nccl", "gloo" or what else `init_process_group` takes; None: nccl where each rank of the node has a
            GPU of its own, gloo otherwise.
        processes_per_node: ranks on each node, >= 1; "auto" is one for each accelerator, at least one.
        seed: in [0, 2**32); seeds `random`, numpy and torch alike in every rank before the function is called, so
            that a model made from a config has the same first weights everywhere. `TrainingArguments(seed=...)` is
            the trainer's own. None: they are not touched.
        timeout_s: seconds, > 0, that a collective waits for the other ranks; None: torch's own.

    Raises:
        UsageError: an option is not legal, or what is decorated cannot be.
        MissingDependency: in the rank: Transformers, Accelerate or torch is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not meet.

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
        """Accelerate's, and how many threads the tokenizers (in Rust, with rayon) make: as many as torch.

        TOKENIZERS_PARALLELISM is left alone. Unset, the tokenizers use their threads, and stop using them in a process
        that is forked from theirs, as the workers of data loaders are. "true" makes such a worker hang (seen with
        tokenizers 0.23), and "false" makes the rank itself slow.
        """
        variables = super().environment(rank)
        if "RAYON_NUM_THREADS" not in os.environ:
            threads = variables.get("OMP_NUM_THREADS") or os.environ["OMP_NUM_THREADS"]
            variables["RAYON_NUM_THREADS"] = threads.partition(",")[0]  # of OpenMP it may be a list
        return variables

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        load_framework("transformers", extra=self.extra)
        with super().session(rank):
            yield


transformers = decorator_of(TransformersIntegration)
