"""A user's model below its wrappers, and the part of it that one rank holds: a pipeline's stage, or shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ModelPart", "WholeModel", "is_dtensor", "local_of", "part_of", "unwrapped"]

_DATA_PARALLEL = ("DistributedDataParallel", "DataParallel")


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """All parts together. name: of the model's class; text: its layers; parameters, trained: how many values."""

    name: str
    text: str
    parameters: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """What a trainer says as its `model_part`, where the `model` that it gives to callbacks is one of several parts.

    names: the model's name of each parameter, by its name in the part.
    is_counted: whether this rank speaks for its part. Of ranks that hold the same part, one does.
    whole: the model that the counted parts are together.
    """

    names: Mapping[str, str]
    is_counted: bool
    whole: WholeModel


def part_of(trainer: Any) -> ModelPart | None:
    """This rank's part; None where the callbacks' model is the whole one, or every rank's shard of it (DTensors)."""
    return getattr(trainer, "model_part", None)


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is spread over ranks (fully_shard, tensor parallelism).

    By what it has, not by class: `torch.distributed.tensor` takes long to import, and is not there in every build.
    """
    return hasattr(value, "placements") and hasattr(value, "to_local")


def local_of(tensor: Any) -> Any:
    """Return this rank's own part of a DTensor; any other tensor itself."""
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
