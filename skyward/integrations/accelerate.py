"""Hugging Face Accelerate: `Accelerator()` in each rank is one process of the world that skyward has opened.

It stands on PyTorch's integration, which opens the process group: Accelerate takes a group that is open as its own.
What it cannot see by itself is that a world without accelerators is one too: without ACCELERATE_USE_CPU, which
`accelerate launch` sets there, each rank on the CPU would believe that it is alone, and train alone.
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

__all__ = ["AccelerateIntegration", "accelerate"]


@dataclass(frozen=True, kw_only=True)
class AccelerateIntegration(TorchIntegration):
    """Runs the function as the processes of an Accelerate world; use it bare or with options.

    `Accelerator()` then has the `process_index`, `num_processes` and device of the rank, on GPUs and on the CPU. Its
    own configuration (mixed precision, FSDP) is given to it as ever: by its arguments, or by the variables that
    `accelerate launch` sets, in `Image(env={...})`. All that `sky.integrations.torch` says holds here too, its
    options among it; where both stand on a function, the process group is opened once, by the upper one.

    Args:
        backend: "nccl", "gloo" or what else `init_process_group` takes; None: nccl where each rank of the node has a
            GPU of its own, gloo otherwise.
        processes_per_node: ranks on each node, >= 1; "auto" is one for each accelerator, at least one.
        seed: in [0, 2**32); seeds `random`, numpy and torch alike in every rank. None: they are not touched.
        timeout_s: seconds, > 0, that a collective waits for the other ranks; None: torch's own.

    Raises:
        UsageError: an option is not legal, or what is decorated cannot be.
        MissingDependency: in the rank: Accelerate or torch is not installed on the node.
        RendezvousFailed: in the rank: the ranks could not meet.

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
            # Here and not in `environment`: only torch knows which devices it can use.
            if not _has_accelerator(load_framework("torch", extra=self.extra)):
                os.environ.setdefault("ACCELERATE_USE_CPU", "true")
            yield


accelerate = decorator_of(AccelerateIntegration)


def _has_accelerator(torch: Any) -> bool:
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    return bool((torch.cuda if accelerator is None else accelerator).is_available())
