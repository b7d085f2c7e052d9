"""TensorBoard's own reader, for tests, without TensorFlow, which it would load for the file system."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["scalars_in", "texts_in", "without_tensorflow"]


def without_tensorflow() -> None:
    """Make tensorboard use its own stand-in, by the module that its builds without TensorFlow have."""
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))


def _read(folder: Path | str) -> Any:
    without_tensorflow()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars_in(folder: Path | str) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values by tag, in the order of the file."""
    read = _read(folder)
    return {
        tag: [(each.step, round(each.value, 6)) for each in read.Scalars(tag)] for tag in sorted(read.Tags()["scalars"])
    }


def texts_in(folder: Path | str) -> dict[str, list[tuple[int, str]]]:
    read = _read(folder)
    return {
        tag.removesuffix("/text_summary"): [
            (each.step, each.tensor_proto.string_val[0].decode()) for each in read.Tensors(tag)
        ]
        for tag in sorted(read.Tags()["tensors"])
    }
