"""Remembers the blobs of arrays that are sent again and again, by identity instead of by content.

Naming 200 MB by content takes 20 ms, and a grid search sends the same array with every fit. Whoever knows that the
arrays stay as they are for a while, as joblib demands for the length of a `Parallel` call, need not look again.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from .blobs import Blob
from .mapped import reduce_mapped
from .payloads import PutBlob

__all__ = ["SeenArrays"]


class SeenArrays:
    """Blobs of the numpy arrays of at least `min_bytes` (None: of no array) that went through `put`.

    `has_same_files`: the receivers see our files, so that arrays of a file need no blob; see `mapped`.

    Good for as long as nobody writes to the arrays: a write is not noticed. Keeps no array alive; forgets one when it
    dies. Everything that is no numpy array is left to the content. Thread-safe.
    """

    def __init__(self, min_bytes: int | None, *, has_same_files: bool = False) -> None:
        self._min_bytes = sys.maxsize if min_bytes is None else min_bytes
        self._has_same_files = has_same_files
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], Blob]] = {}

    def put(self, data: memoryview, put: PutBlob) -> Blob:
        """The blob with this content, from `put` unless the array was seen before."""
        root = _root(data.obj) if data.nbytes >= self._min_bytes else None
        if root is None:
            return put(data)
        # Pickling makes views (of a Fortran-ordered array, a transposed one), so the place in memory is the name;
        # the owner of the memory says whether it is still the same place.
        key = (data.obj.__array_interface__["data"][0], data.nbytes)  # type: ignore[attr-defined]
        known = self._known.get(key)
        if known is not None and known[0]() is root:
            return known[1]
        blob = put(data)
        self._known[key] = (weakref.ref(root, lambda _: self._known.pop(key, None)), blob)
        return blob

    def reduce(self, value: Any) -> Any:
        """How to pickle `value`; None: in the usual way."""
        return reduce_mapped(value) if self._has_same_files else None

    def clear(self) -> None:
        self._known.clear()


def _root(owner: Any) -> Any:
    """The array that a view of an array was made from; None if it is no array."""
    if not hasattr(owner, "__array_interface__"):
        return None
    while hasattr(getattr(owner, "base", None), "__array_interface__"):
        owner = owner.base
    return owner
