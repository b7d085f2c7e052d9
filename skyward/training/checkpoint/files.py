"""Checkpoints of a run whose components are given with each call: the seam of the Trainer, and its folders.

A save behind training blocks it for the snapshot only: a thread writes it and agrees with other ranks. What passes
between the ranks meanwhile goes over a gloo group of its own, so it meets no collective of training.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from ...errors import CheckpointSaveFailed
from ..agree import Alone, Ranks, TorchRanks
from ..snapshot import Snapshot, SnapshotPool, common_pool
from .commit import sweep
from .folders import Folder, folder_at
from .layout import checkpoints_in, name_of
from .load import LoadReport, LoadRequest, Resharder, perform_load
from .manifest import manifest_fields
from .patterns import StateComponent
from .retention import latest_of_ranks, prune_or_warn
from .save import SaveRequest, perform_save, states_of, states_to_keep
from .topology import ranks_of_groups

__all__ = ["BackgroundSave", "Checkpoints", "FileCheckpoints", "OnBusy", "sweep_folder"]

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


OnBusy = Literal["wait", "skip"]
"""What a save does while the one before it is being written: it waits for it, or is left out, on all ranks alike."""


class BackgroundSave:
    """One save of all ranks, in a thread of each.

    Args:
        ranks: what the threads talk over; no other save may use it meanwhile.
        after: called on every rank in the thread after the commit, with the checkpoint's path.
    """

    def __init__(self, ranks: Ranks, request: SaveRequest, *, after: Callable[[str], None] | None = None) -> None:
        self._ranks, self._request, self._after = ranks, request, after
        self._is_copied = threading.Event()
        self._snapshot: Snapshot | None = None
        self._copy_error: Exception | None = None
        self._path = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._save, name=f"save {request.name}", daemon=False)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self, copy: Callable[[], Snapshot]) -> None:
        """Write the snapshot that `copy` takes, and return when it is taken.

        Raises: what ends a process (KeyboardInterrupt). Errors of `copy` fail the save on all ranks: see `path`.
        """
        try:
            # Before the copy: a thread that starts holds the interpreter for its first milliseconds, at once.
            self._thread.start()
            try:
                self._snapshot = copy()
            except Exception as error:
                self._copy_error = error  # raised where the other ranks wait for this one
        finally:
            self._is_copied.set()

    def path(self, timeout_s: float | None = None) -> str:
        """Wait for the end, and return the path of the checkpoint.

        Raises: what the save raised, the same on all ranks; CheckpointSaveFailed when the time is up.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointSaveFailed(
                f"{self._thread.name}: not durable within {timeout_s:g} s; the last checkpoint is as it was",
                rank=self._ranks.rank,
                error="too slow",
            )
        if self._error is not None:
            raise self._error
        return self._path

    def _save(self) -> None:
        try:
            self._path = perform_save(self._ranks, self._request, self._states)
            if self._after is not None:
                self._after(self._path)
        except BaseException as error:
            self._error = error
        finally:
            if self._snapshot is not None:
                self._snapshot.release()

    def _states(self) -> Any:
        self._is_copied.wait()
        if self._copy_error is not None:
            raise self._copy_error
        if self._snapshot is None:
            raise InterruptedError("interrupted while the states were copied")
        return self._snapshot.state


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
