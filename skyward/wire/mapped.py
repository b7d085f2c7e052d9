"""Memory-mapped arrays (numpy.memmap), sent as the name of their file and an offset.

Only for receivers that see the same files. Nothing is copied, however large the file is. If the array is open for
writing, a task's changes are in the file, where the sender sees them.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

_MODES = {"r": "r", "r+": "r+", "w+": "r+"}
"""Mode of the receiver by mode of the sender. "w+" again would empty the file. "c" (copy on write) is missing because
its changes are not in the file.
"""


def reduce_mapped(array: Any) -> Any:
    """Return how to pickle an array, or a view of one, whose file still exists; None for everything else."""
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
    """Return the numpy.memmap that maps the file. Views inherit its `offset` attribute, which is wrong for them."""
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
    """Map `size` bytes of the file from offset `place` on. The array's first element is `first` bytes into them.

    The result is a numpy.memmap only if the original was one and is contiguous, as with joblib.
    """
    import numpy as np

    if not size:
        return np.empty(shape, dtype)
    data: Any = np.memmap(path, np.uint8, mode, place, (size,))
    array: Any = np.ndarray(shape, dtype, data, first, strides)
    return array.view(np.memmap) if is_memmap else array
