"""Tasks about values that stay and graphs, and a view of the values that a node keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import skyward as sky
from tests.waiting import open_files

__all__ = ["LENGTH", "blobs", "failing", "first", "flat", "node", "noted", "numbers"]

LENGTH = 200_000
"""Numbers in an array of 1.6 MB, which is too large for a frame."""


@sky.compute
def numbers(start: int) -> Any:
    return np.arange(start, start + LENGTH, dtype=np.float64)


@sky.compute
def first(array: Any) -> tuple[float, int]:
    return float(array[0]), node()


@sky.compute
def noted(path: Path, value: Any) -> Any:
    """Return the value, and add a line to a file."""
    with path.open("a") as file:
        file.write(f"{value}\n")
    return value


@sky.compute
def flat(*values: Any, **named: Any) -> Any:
    return [*values, named] if named else list(values)


@sky.compute
def failing(value: Any) -> Any:
    raise LookupError(f"no {value}")


def node() -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


def blobs(pool: sky.ComputePool, number: int) -> int:
    """Return the number of files of large values that the agent of a node holds open."""
    files = open_files(pool.agent_pids()[number])
    return sum("memfd:skyward-kept" in file or "memfd:skyward-blob" in file for file in files)
