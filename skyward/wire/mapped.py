"""Arrays of a file (numpy.memmap), sent as the name of the file and a place in it.

For receivers that see the same files: nothing is copied, however large the file is, and what a task writes to an array
of a file that is open for writing is in the file, where the sender sees it.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

__all__ = ["reduce_mapped"]

_MODES = {"r": "r", "r+": "r+", "w+": "r+"}
"""What the sender opened it with, and the receiver does: "w+" again would empty it. Not "c": its changes are not in
the file.
"""


def reduce_mapped(array: Any) -> Any:
    """How to pickle an array that lies in a file that is still there, a view of one too; None for everything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(array, numpy.ndarray) or array.dtype.hasobject:
        return None
    root = _root(array, numpy.memmap)
    if root is None or root.mode not in _MODES or root.filename is None or not os.path.exists(root.filename):
        return None
    mode = _MODES[root.mode] if array.flags.writeable else "r"
    reaches = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    before = -sum(reach for reach in reaches if reach < 0)
    after = sum(reach for reach in reaches if reach > 0) + array.itemsize
    address = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return _open, (
        *(os.fspath(root.filename), mode, root.offset + address - before, before + after if array.size else 0),
        *(array.dtype, array.shape, array.strides, before, isinstance(array, numpy.memmap) and array.flags.forc),
    )


def _root(array: Any, memmap: type) -> Any:
    """The numpy.memmap that holds the file itself: views inherit its `offset`, whatever theirs is."""
    while array is not None and not isinstance(array, mmap.mmap):
        base = getattr(array, "base", None)
        if isinstance(array, memmap) and isinstance(base, mmap.mmap):
            return array
        array = base
    return None


def _open(
    path: str,
    mode: Any,
    place: int,
    size: int,
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    first: int,
    is_memmap: bool,
) -> Any:
    """The array in these `size` bytes of the file from `place` on; its first element is `first` bytes into them.

    A numpy.memmap only where it was one and is contiguous, as joblib has it.
    """
    import numpy as np

    if not size:
        return np.empty(shape, dtype)
    data: Any = np.memmap(path, np.uint8, mode, place, (size,))
    array: Any = np.ndarray(shape, dtype, data, first, strides)
    return array.view(np.memmap) if is_memmap else array
