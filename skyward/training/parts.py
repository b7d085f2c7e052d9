"""The user's model below its wrappers, and the part of it that one rank holds: a pipeline stage, or shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DATA_PARALLEL = ("DistributedDataParallel", "DataParallel")


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """Description of the whole model, of which each rank holds one part."""

    name: str
    """Name of the model's class."""
    text: str
    """Layers of the model, as `str(model)` shows them."""
    parameters: int
    """Number of values in all parameters."""
    trained: int
    """Number of values in parameters that require a gradient."""


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A trainer's `model_part`: set if the `model` that callbacks receive is one of several parts."""

    names: Mapping[str, str]
    """Name of each parameter in the whole model, by its name in the part."""
    is_counted: bool
    """Whether this rank represents its part. Of the ranks that hold the same part, exactly one does."""
    whole: WholeModel
    """The model that all parts form together."""


def part_of(trainer: Any) -> ModelPart | None:
    """Return this rank's part; None if callbacks receive the whole model, or a model of DTensor shards."""
    return getattr(trainer, "model_part", None)


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is sharded over ranks (fully_shard, tensor parallelism)."""
    # Checked by attribute, because torch.distributed.tensor is slow to import and missing in some builds.
    return hasattr(value, "placements") and hasattr(value, "to_local")


def local_of(tensor: Any) -> Any:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if callable(to_local) else tensor


def unwrapped(model: Any) -> Any:
    """Return the user's model without wrappers of data parallelism (`.module`) and torch.compile (`._orig_mod`)."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and any(kind.__name__ in _DATA_PARALLEL for kind in type(model).__mro__):
            inner = model.module
        if inner is None:
            return model
        model = inner
