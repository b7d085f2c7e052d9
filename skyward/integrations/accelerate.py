"""Hugging Face Accelerate: `Accelerator()` in each rank becomes one process of the process group that skyward opens.

It builds on the PyTorch integration, which opens the group; Accelerate uses a group that is already open. Accelerate
does not recognise a world without accelerators. `accelerate launch` sets ACCELERATE_USE_CPU there, and so does this
integration. Without it each rank on the CPU would train alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from ..values.topology import Rank
from .base import decorator_of, load_framework
from .torch import TorchIntegration


@dataclass(frozen=True, kw_only=True)
class AccelerateIntegration(TorchIntegration):
    """Run the function as the processes of an Accelerate world; use it bare or with options.

    `Accelerator()` then has the rank's `process_index`, `num_processes` and device, on GPUs and on the CPU. Configure
    mixed precision or FSDP as usual: by its arguments, or by `accelerate launch`'s variables in `Image(env={...})`.

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
        MissingDependency: in the rank: Accelerate or torch is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not connect to each other.

    Example:
        >>> @accelerate(seed=0)
        ... def world() -> tuple[int, int]:
        ...     from accelerate import Accelerator
        ...     accelerator = Accelerator()
        ...     return accelerator.process_index, accelerator.num_processes
        >>> world.__name__
        'world'
    """

    name: ClassVar[str] = "accelerate"
    extra: ClassVar[str] = "accelerate"
    packages: ClassVar[tuple[str, ...]] = ("accelerate", "torch")
    preload: ClassVar[tuple[str, ...]] = (*TorchIntegration.preload, "accelerate.accelerator")

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        load_framework("accelerate", extra=self.extra)
        with super().session(rank):
            # Here and not in `environment`, because only torch knows which devices it can use.
            if not _has_accelerator(load_framework("torch", extra=self.extra)):
                os.environ.setdefault("ACCELERATE_USE_CPU", "true")
            yield


accelerate = decorator_of(AccelerateIntegration)


def _has_accelerator(torch: Any) -> bool:
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    return bool((torch.cuda if accelerator is None else accelerator).is_available())
