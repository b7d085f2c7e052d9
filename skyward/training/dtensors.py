"""Tensors that are spread over ranks."""

from __future__ import annotations

from typing import Any

__all__ = ["is_dtensor"]


def is_dtensor(value: Any) -> bool:
    """Return whether other ranks hold parts of it (fully_shard, tensor parallelism).

    By what it has, not by class: `torch.distributed.tensor` takes long to import, and is not there in every build.
    """
    return hasattr(value, "placements") and hasattr(value, "to_local")
