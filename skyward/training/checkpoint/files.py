"""Checkpoints whose components are passed with each call: the interface for the Trainer, and its folders.

An asynchronous save blocks training only for the snapshot. A thread then writes it and agrees with the other ranks. Its
messages use a gloo group of their own, so they never meet a collective of training.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from ...errors import CheckpointSaveFailed
from ...stores.folders import Folder, folder_at
from ..agree import Alone, Ranks, TorchRanks
from ..snapshot import Snapshot, SnapshotPool, common_pool
from .commit import sweep
from .fence import writer_here
from .layout import checkpoints_in, name_of
from .load import LoadReport, LoadRequest, Resharder, perform_load
from .manifest import manifest_fields
from .patterns import StateComponent
from .retention import latest_of_ranks, prune_or_warn
from .save import SaveRequest, perform_save, states_of, states_to_keep
from .topology import ranks_of_groups

_log = logging.getLogger(__name__)


class Checkpoints(Protocol):
    """Destination of a run's states. For a collective method, all ranks make the same calls in the same order.

    Example:
        checkpoints: Checkpoints = FileCheckpoints("out", ranks=ranks)
        checkpoints.save(100, components)
    """

    def save(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        process_groups: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Save the components as the checkpoint of `step`, in place of an existing one. Collective.

        Args:
            step: number that names the checkpoint.
            components: parts of the checkpoint.
            process_groups: groups that components name, as in `CheckpointCoordinator`.
            metadata: values for the manifest, as in `CheckpointCoordinator`; `is_finite` may be a tensor of one bool.

        Returns:
            The path of the checkpoint.

        Raises:
            SkywardError: a rank failed. It is raised on all ranks, and an earlier checkpoint stays as it was.
        """

    def save_async(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        process_groups: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy the states and return; a thread writes them. Collective. It first waits for the previous save.

        Args:
            step: as in `save`.
            components: as in `save`.
            process_groups: as in `save`.
            metadata: as in `save`.

        Raises:
            Exception: the error of the previous save. This save's error is raised by the next call, `poll` or `wait`.
        """

    def poll(self) -> str | None:
        """Return the path of a pending save that has ended on all ranks, or raise its error. Cheap. Collective."""

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Wait for the pending save, and return its path; None if there is none.

        Args:
            timeout_s: longest wait in seconds; None: no limit.

        Raises:
            CheckpointSaveFailed: the save failed, or the time is up. Other errors of the save are raised as themselves.
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
        """Load the states of a checkpoint into the components. Collective.

        Args:
            path: folder or URL of the checkpoint.
            components: components to load into.
            strict: as in `CheckpointCoordinator.load_checkpoint`.
            only: keys to load; None: all.
            process_groups: as in `save`.
            resharders: as in `CheckpointCoordinator.load_checkpoint`.

        Returns:
            A report of the loaded and the skipped components.
        """

    def latest(self) -> str | None:
        """Return the path of the newest checkpoint that is not known to be non-finite; None if there is none.

        Collective.
        """

    def path_of(self, step: int) -> str | None:
        """Return the path of the checkpoint of `step`, if there is one."""

    def prune(self, *, keep: int, protect: Collection[str]) -> None:
        """Delete the oldest checkpoints until `keep` are left. Collective.

        Those in `protect`, the newest, and the newest finite one are kept in any case.
        """


OnBusy = Literal["wait", "skip"]
"""Behaviour of a save while the previous one is being written: it waits, or is left out, alike on all ranks."""


class BackgroundSave:
    """One save of all ranks, in a thread of each.

    Args:
        ranks: connection between these threads; no other save may use it in the meantime.
        request: what to save.
        after: called with the path after the commit, on every rank, in the thread.
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
        """Write the snapshot that `copy` takes; return when it is taken.

        Raises:
            KeyboardInterrupt: or another error that ends a process. Ordinary errors of `copy` fail the save on all
                ranks; see `path`.
        """
        try:
            # Start the thread before the copy: a new thread holds the interpreter for its first milliseconds, and the
            # copy would otherwise wait for it.
            self._thread.start()
            try:
                self._snapshot = copy()
            except Exception as error:
                self._copy_error = error  # the thread raises it where the other ranks wait for this one
        finally:
            self._is_copied.set()

    def path(self, timeout_s: float | None = None) -> str:
        """Wait for the end, and return the path of the checkpoint.

        Raises:
            CheckpointSaveFailed: not durable within `timeout_s`.
            Exception: the error of the save, the same on all ranks.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointSaveFailed(
                f"{self._thread.name}: not durable within {timeout_s:g} s, and the previous checkpoint is unchanged; "
                "check the disk, or raise timeout_s",
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
            raise InterruptedError("save: interrupted while the states were copied; nothing was written, save again")
        return self._snapshot.state


class FileCheckpoints:
    """Folders `folder/checkpoint-<step>`, on a disk that all ranks share, or on a disk of each node.

    One save is written at a time. All ranks create it, and call its methods at the same places.

    Args:
        folder: a path, or a URL of an object store.
        ranks: ranks of the run.
        on_each_node: whether `folder` is on a disk of each node.
        allow_pickle: save and load objects of any class, as in `CheckpointCoordinator`, whose guarantees apply here.
        pool: takes the snapshots of asynchronous saves.

    Example:
        checkpoints = FileCheckpoints("out", ranks=ranks)
        path = checkpoints.save(100, components)
        checkpoints.load(path, components)
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
        """Return whether this rank sweeps and deletes: one rank of all, or one on each node."""
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
        """Save, and return the checkpoint's path when it is durable. Collective. It raises the errors of `save`."""
        self.wait()
        return perform_save(self._ranks, request, lambda: states_of(request.components))

    def write_behind(self, request: SaveRequest, *, after: Callable[[str], None] | None = None) -> None:
        """Save in a thread. Collective. It raises the errors of `save_async`.

        Args:
            request: what to save.
            after: called with the path after the commit, on every rank, in the thread.
        """
        self.wait()
        if self._background_ranks is None:
            # Opening the threads' gloo group is collective. All ranks get here at the same save, their first.
            self._background_ranks = TorchRanks() if self._ranks.world_size > 1 else Alone()
        self._pending = BackgroundSave(self._background_ranks, request, after=after)
        pool = self._pool = self._pool or common_pool()  # held, so that the next save finds its buffers
        self._pending.start(
            lambda: pool.take(states_to_keep(self._ranks, request), moment=request.about.get("step")),
        )

    @property
    def is_pending(self) -> bool:
        """Return whether a save has started whose end `poll` or `wait` has not seen. All ranks agree on it."""
        return self._pending is not None

    def poll(self) -> str | None:
        # One rank's thread may end before another's. All ranks act on the combined flag, so they call `wait` together.
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
        return latest_of_ranks(self._ranks, self.folder, on_each_node=self._on_each_node, writer=writer_here())

    def path_of(self, step: int) -> str | None:
        return next(
            (checkpoint.path for checkpoint in checkpoints_in(self.folder) if checkpoint.checkpoint_id == str(step)),
            None,
        )

    def prune(self, *, keep: int, protect: Collection[str]) -> None:
        if self.is_leader:
            prune_or_warn(self.folder, keep=keep, protect=lambda: protect)

    def sweep(self) -> None:
        """Remove the remains of interrupted saves and deletions."""
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
    """Remove the remains of interrupted saves and deletions from a folder, and log them."""
    for name in sweep(folder):
        _log.info("%s: removed %s of an interrupted save", folder.path, name)
