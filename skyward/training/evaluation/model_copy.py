"""Copies of whatever holds a model's weights: torch tensors, or arrays where there is no torch."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from ..snapshot import ArraySnapshotPool, SnapshotPool

__all__ = ["ModelCopy", "ModelCopier", "is_snapshot"]


class ModelCopy(Protocol):
    """A snapshot of any kind, as its readers see it."""

    @property
    def state(self) -> Any: ...

    def retain(self) -> Any: ...

    def release(self) -> None: ...


class ModelCopier:
    """Takes snapshots of states, of tensors or of arrays. For one thread.

    Args:
        pool: for tensors; None is the common one.
        keep: sets of free buffers that stay.
    """

    def __init__(self, pool: SnapshotPool | None, *, keep: int) -> None:
        self._tensors, self._arrays = pool, cast("ArraySnapshotPool | None", None)
        self._keep = keep

    def take(self, state: Any, *, waits: bool, moment: Hashable = None) -> ModelCopy:
        """A true copy, or one more reference of a snapshot.

        Args:
            waits: until the device has copied.
            moment: as `SnapshotPool.take`'s.
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
    """Whether it can be retained. Its `state`, which may wait for a device, is not looked at."""
    return callable(getattr(type(state), "retain", None)) and callable(getattr(type(state), "release", None))


def _holds_tensors(state: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:  # then nobody has made one
        return False
    if isinstance(state, Mapping):
        return any(_holds_tensors(item) for item in state.values())
    if isinstance(state, list | tuple):
        return any(_holds_tensors(item) for item in state)
    return isinstance(state, torch.Tensor)
