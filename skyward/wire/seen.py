"""Cache of blobs for arrays that are sent repeatedly, keyed by identity instead of content.

Hashing 200 MB takes 20 ms, and a grid search sends the same array with every fit. A caller that knows its arrays will
not change, as joblib requires during a `Parallel` call, can skip the hash.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from .blobs import Blob
from .mapped import reduce_mapped
from .payloads import PutBlob


class SeenArrays:
    """Blobs of the large numpy arrays that went through `put`. Thread-safe.

    Valid only while nobody writes to the arrays, because a write goes unnoticed. Keeps no array alive, and forgets an
    array when it dies. Buffers that do not belong to numpy arrays are still hashed.

    Args:
        min_bytes: Size from which arrays are remembered; None: none are.
        has_same_files: Whether receivers see this machine's files, so that memory-mapped arrays need no blob; see
            `mapped`.
    """

    def __init__(self, min_bytes: int | None, *, has_same_files: bool = False) -> None:
        self._min_bytes = sys.maxsize if min_bytes is None else min_bytes
        self._has_same_files = has_same_files
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], Blob]] = {}

    def put(self, data: memoryview, put: PutBlob) -> Blob:
        """Return the blob for `data`: the remembered one, or else the result of `put`."""
        root = _root(data.obj) if data.nbytes >= self._min_bytes else None
        if root is None:
            return put(data)
        # Pickling makes new view objects (for a Fortran-ordered array, a transposed one), so the address is the key.
        # An address can be reused after the array died, so the owner of the memory must be the same object too.
        key = (data.obj.__array_interface__["data"][0], data.nbytes)  # type: ignore[attr-defined]
        known = self._known.get(key)
        if known is not None and known[0]() is root:
            return known[1]
        blob = put(data)
        self._known[key] = (weakref.ref(root, lambda _: self._known.pop(key, None)), blob)
        return blob

    def reduce(self, value: Any) -> Any:
        """Return how to pickle `value`, in the form of `__reduce__`; None: in the usual way."""
        return reduce_mapped(value) if self._has_same_files else None

    def clear(self) -> None:
        self._known.clear()


def _root(owner: Any) -> Any:
    """Return the array that owns the memory of a view; None if `owner` is not an array."""
    if not hasattr(owner, "__array_interface__"):
        return None
    while hasattr(getattr(owner, "base", None), "__array_interface__"):
        owner = owner.base
    return owner
