"""Consistent copies of a run's state in host memory, which several readers share."""

from .take import Snapshot, SnapshotPool

__all__ = ["Snapshot", "SnapshotPool"]
