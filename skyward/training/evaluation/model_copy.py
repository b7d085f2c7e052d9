"""Copies of a model's weights, for torch tensors and for arrays of processes without torch."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from ..snapshot import ArraySnapshotPool, SnapshotPool


class ModelCopy(Protocol):
    """Snapshot of any kind, as its readers see it."""

    @property
    def state(self) -> Any: ...

    def retain(self) -> Any: ...

    def release(self) -> None: ...


class ModelCopier:
    """Take snapshots of states made of tensors or arrays. Use it from one thread.

    Args:
        pool: pool for tensors; None means the process's common one.
        keep: sets of free buffers to keep.
    """

    def __init__(self, pool: SnapshotPool | None, *, keep: int) -> None:
        self._tensors, self._arrays = pool, cast("ArraySnapshotPool | None", None)
        self._keep = keep

    def take(self, state: Any, *, waits: bool, moment: Hashable = None) -> ModelCopy:
        """Return a copy of the state, or one more reference if it is a snapshot.

        Args:
            state: nested dicts and lists of tensors or arrays, or a snapshot.
            waits: wait until the device has copied.
            moment: as in `SnapshotPool.take`.
        """
        if is_snapshot(state):
            return cast(ModelCopy, state.retain())
        if not _holds_tensors(state):
            return self._array_pool().take(state)
        if self._tensors is None:
            from ..snapshot import common_pool

            self._tensors = common_pool(keep=self._keep)
        taken = self._tensors.take(state, moment=moment)
        if waits:
            _ = taken.state
        return taken

    def _array_pool(self) -> ArraySnapshotPool:
        if self._arrays is None:
            from ..snapshot import ArraySnapshotPool

            self._arrays = ArraySnapshotPool(keep=self._keep)
        return self._arrays


def is_snapshot(state: Any) -> bool:
    """Return whether `state` can be retained, without reading its `state`, which may wait for a device."""
    return callable(getattr(type(state), "retain", None)) and callable(getattr(type(state), "release", None))


def _holds_tensors(state: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:  # without torch in the process there are no tensors
        return False
    if isinstance(state, Mapping):
        return any(_holds_tensors(item) for item in state.values())
    if isinstance(state, list | tuple):
        return any(_holds_tensors(item) for item in state)
    return isinstance(state, torch.Tensor)
