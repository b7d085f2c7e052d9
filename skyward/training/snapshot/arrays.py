"""Snapshots of arrays without torch, for weights as Keras returns them, on any backend."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np

from ..nested import map_leaves
from .shared import Shared

_Buffers = dict[tuple[tuple[int, ...], str], list[Any]]


class ArraySnapshot(Shared):
    """Copy of a state of arrays, taken by `ArraySnapshotPool.take`.

    It begins with one reference, the taker's. Any thread may read, retain and release it. After the last release its
    arrays belong to another snapshot.

    Example:
        >>> import numpy as np
        >>> weights = [np.zeros(2)]
        >>> with ArraySnapshotPool().take(weights) as snapshot:
        ...     weights[0] += 1.0
        ...     snapshot.state[0].tolist()
        [0.0, 0.0]
    """

    def __init__(self, pool: ArraySnapshotPool, state: Any, buffers: list[Any]) -> None:
        super().__init__()
        self._pool, self._state, self._buffers = pool, state, buffers

    @property
    def state(self) -> Any:
        """State as it was when taken; do not change it."""
        return self._state

    def _let_go(self) -> None:
        self._pool._give_back(self._buffers)
        self._state, self._buffers = None, []


class ArraySnapshotPool:
    """Take snapshots of arrays into buffers that are reused.

    Args:
        keep: free buffers to keep for each array of a state.

    Example:
        >>> import numpy as np
        >>> pool = ArraySnapshotPool(keep=2)
        >>> pool.take({"bias": np.ones(3)}).state["bias"].sum().item()
        3.0
    """

    def __init__(self, *, keep: int = 2) -> None:
        self._keep = keep
        self._free: _Buffers = {}
        self._most: dict[tuple[tuple[int, ...], str], int] = {}
        self._lock = threading.Lock()

    def take(self, state: Any) -> ArraySnapshot:
        """Copy every array of a nested state, also JAX's, and deep-copy the rest.

        Args:
            state: nested dicts, lists and tuples of arrays and plain values.

        Returns:
            A snapshot with one reference, the caller's.
        """
        buffers: list[Any] = []
        counts: dict[tuple[tuple[int, ...], str], int] = {}

        def copied(leaf: Any) -> Any:
            if not hasattr(leaf, "__array__"):
                return copy.deepcopy(leaf)
            source = np.asarray(leaf)
            if source.dtype.hasobject:
                return copy.deepcopy(source)
            key = (source.shape, str(source.dtype))
            counts[key] = counts.get(key, 0) + 1
            buffer = self._buffer(key, source)
            np.copyto(buffer, source)
            buffers.append(buffer)
            return buffer

        taken = map_leaves(state, copied)
        with self._lock:
            self._most = counts
        return ArraySnapshot(self, taken, buffers)

    # Internals -------------------------------------------------------------------------------------------------------

    def _buffer(self, key: tuple[tuple[int, ...], str], source: Any) -> Any:
        with self._lock:
            free = self._free.get(key)
            if free:
                return free.pop()
        return np.empty_like(source, order="C", subok=False)

    def _give_back(self, buffers: list[Any]) -> None:
        with self._lock:
            # Shapes that the latest state lacks are unlikely to come back, so their buffers are freed.
            self._free = {key: free for key, free in self._free.items() if key in self._most}
            for buffer in buffers:
                key = (buffer.shape, str(buffer.dtype))
                free = self._free.setdefault(key, [])
                if len(free) < self._keep * self._most.get(key, 0):
                    free.append(buffer)
