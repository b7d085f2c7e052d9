"""Algorithms that give the same again."""

from __future__ import annotations

import os

import torch

from ..arguments import TrainingArguments

__all__ = ["make_deterministic"]

_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}
"""Of libraries for devices. Source: transformers 5.23, enable_full_determinism."""


def make_deterministic(args: TrainingArguments) -> None:
    """With `full_determinism` torch uses deterministic algorithms only, in this process and from now on; where it has
    none it raises a RuntimeError that names the operation. Before a device is used: libraries look once.
    """
    if args.full_determinism:
        os.environ.update(_SETTINGS)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
