"""Checkpoints of a run whose components are given with each call: the seam of the Trainer, and its folders."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from ..agree import Alone, Ranks, TorchRanks
from ..snapshot import SnapshotPool, common_pool
from .background import BackgroundSave
from .commit import sweep
from .folders import Folder, folder_at
from .latest import latest_of_ranks
from .layout import checkpoints_in, name_of
from .load import LoadReport, LoadRequest, Resharder, perform_load
from .manifest import manifest_fields
from .patterns import StateComponent
from .retention import prune_or_warn
from .save import SaveRequest, perform_save, states_of, states_to_keep
from .topology import ranks_of_groups

__all__ = ["Checkpoints", "FileCheckpoints", "sweep_folder"]

_log = logging.getLogger(__name__)


class Checkpoints(Protocol):
    """Where a run's states go. Methods that say so are collective: all ranks call them, in one order."""

    def save(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        process_groups: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Keeps them as the checkpoint of `step`, in place of one that is there. Collective. Gives its path.

        process_groups: those that components name; metadata: of the manifest; both as `CheckpointCoordinator` takes
        them. `is_finite` in it may be a tensor of one bool.
        Raises: on every rank, if one fails; then what was there before is still there.
        """

    def save_async(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        process_groups: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """As `save`, but returns when the states are copied; they are written behind the caller. Waits for the save
        before it. Raises: what that has; its own error is raised by the next call, `poll` or `wait`.
        """

    def poll(self) -> str | None:
        """Of a pending save: its path if it has ended on all ranks. Cheap. Collective. Raises: what the save has."""

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Until the pending save has ended: its path; None where there is none. Raises: as `poll`, and where the
        time is up.
        """

    def load(
        self,
        path: str,
        components: Sequence[StateComponent],
        *,
        strict: bool = True,
        only: Collection[str] | None = None,
        process_groups: Mapping[str, Any] | None = None,
        resharders: Mapping[str, Resharder] | None = None,
    ) -> LoadReport:
        """Load the states of a checkpoint into the components, or into those with the keys `only`. Collective.

        strict, resharders: as `CheckpointCoordinator.load_checkpoint` takes them.
        """

    def latest(self) -> str | None:
        """The path of the newest checkpoint whose loss and weights were finite, as far as is known; None where there is
        none. Collective.
        """

    def path_of(self, step: int) -> str | None:
        """That of `step`, if there is one."""

    def prune(self, *, keep: int, protect: Collection[str]) -> None:
        """Delete the oldest until `keep` are left; those in `protect`, the newest, and the newest that is finite stay.
        Collective.
        """


class FileCheckpoints:
    """Folders `folder/checkpoint-<step>`, on a disk that all ranks share, or with `on_each_node` on one of each node.

    One save is written at a time. All ranks make it, and call its methods at the same places.

    Args:
        folder: a path, or a URL of an object store.
        allow_pickle: as `CheckpointCoordinator` takes it, whose promises hold here.
        pool: takes the snapshots of asynchronous saves.
    """

    def __init__(
        self,
        folder: str,
        *,
        ranks: Ranks,
        on_each_node: bool = False,
        allow_pickle: bool = False,
        pool: SnapshotPool | None = None,
    ) -> None:
        self.folder = os.fspath(folder)
        self._ranks, self._pool = ranks, pool
        self._on_each_node, self._allow_pickle = on_each_node, allow_pickle
        self._background_ranks: Ranks | None = None
        self._pending: BackgroundSave | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this rank clears and deletes: one of all, or one of each node."""
        return self._ranks.rank == 0 or (self._on_each_node and self._ranks.local_rank == 0)

    def save(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        process_groups: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        return self.write(self._request(step, components, process_groups, metadata))

    def save_async(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        process_groups: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.write_behind(self._request(step, components, process_groups, metadata))

    def write(self, request: SaveRequest) -> str:
        """Perform a save, and return the checkpoint's path when it is durable. Collective. Raises: as `save`."""
        self.wait()
        return perform_save(self._ranks, request, lambda: states_of(request.components))

    def write_behind(self, request: SaveRequest, *, after: Callable[[str], None] | None = None) -> None:
        """Perform a save behind the caller. Collective. Raises: as `save_async`.

        after: called on every rank in the thread, with the path of the committed checkpoint.
        """
        self.wait()
        if self._background_ranks is None:
            self._background_ranks = TorchRanks() if self._ranks.world_size > 1 else Alone()
        self._pending = BackgroundSave(self._background_ranks, request, after=after)
        pool = self._pool or common_pool()
        self._pending.start(
            lambda: pool.take(states_to_keep(self._ranks, request), moment=request.about.get("step")),
        )

    @property
    def is_pending(self) -> bool:
        """Whether a save was begun that `poll` or `wait` has not seen end. The same on all ranks."""
        return self._pending is not None

    def poll(self) -> str | None:
        if self._pending is None or self._ranks.flags(int(self._pending.is_running)):
            return None
        return self.wait()

    def wait(self, timeout_s: float | None = None) -> str | None:
        if self._pending is None:
            return None
        save = self._pending
        try:
            return save.path(timeout_s)
        finally:
            if not save.is_running:
                self._pending = None

    def load(
        self,
        path: str,
        components: Sequence[StateComponent],
        *,
        strict: bool = True,
        only: Collection[str] | None = None,
        process_groups: Mapping[str, Any] | None = None,
        resharders: Mapping[str, Resharder] | None = None,
    ) -> LoadReport:
        self.wait()
        groups = ranks_of_groups(process_groups or {}, self._ranks.rank)
        request = LoadRequest(
            components=components,
            groups=groups,
            strict=strict,
            only=only,
            resharders=resharders or {},
            allow_pickle=self._allow_pickle,
        )
        return perform_load(self._ranks, request, path)

    def latest(self) -> str | None:
        return latest_of_ranks(self._ranks, self.folder, on_each_node=self._on_each_node)

    def path_of(self, step: int) -> str | None:
        return next(
            (checkpoint.path for checkpoint in checkpoints_in(self.folder) if checkpoint.checkpoint_id == str(step)),
            None,
        )

    def prune(self, *, keep: int, protect: Collection[str]) -> None:
        if self.is_leader:
            prune_or_warn(self.folder, keep=keep, protect=lambda: protect)

    def sweep(self) -> None:
        """Clear what an interrupted save or deletion has left."""
        if self.is_leader:
            sweep_folder(folder_at(self.folder))

    def _request(
        self,
        step: int,
        components: Sequence[StateComponent],
        process_groups: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
    ) -> SaveRequest:
        return SaveRequest(
            components=components,
            groups=ranks_of_groups(process_groups or {}, self._ranks.rank),
            parent=self.folder,
            name=name_of(step),
            on_each_node=self._on_each_node,
            allow_pickle=self._allow_pickle,
            about=manifest_fields({"step": step, **(metadata or {})}),
        )


def sweep_folder(folder: Folder) -> None:
    """Clear what interrupted saves and deletions have left in a folder, and log it."""
    for name in sweep(folder):
        _log.info("%s: cleared %s, which an interrupted save had left", folder.path, name)
