"""Checkpoints of a run whose components are given with every call: what the Trainer writes to and reads from."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from ...errors import CheckpointError
from ..agree import Ranks
from .background import BackgroundSaves
from .commit import sweep
from .folders import folder_at
from .latest import latest_of_ranks
from .layout import checkpoints_in, name_of
from .loading import LoadReport, LoadRequest, Resharder, perform_load
from .manifest import manifest_fields
from .patterns import StateComponent
from .retention import prune
from .saving import SaveRequest, perform_save, states_of, states_to_keep
from .topology import ranks_of_groups

__all__ = ["Checkpoints", "FileCheckpoints"]

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

    folder: a path, or a URL of an object store. allow_pickle: as `CheckpointCoordinator` takes it, whose promises hold
        here.
    """

    def __init__(self, folder: str, *, ranks: Ranks, on_each_node: bool = False, allow_pickle: bool = False) -> None:
        self.folder = os.fspath(folder)
        self._ranks = ranks
        self._on_each_node, self._allow_pickle = on_each_node, allow_pickle
        self._is_leader = ranks.rank == 0 or (on_each_node and ranks.local_rank == 0)
        self._saves: BackgroundSaves | None = None

    def save(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        process_groups: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        self.wait()
        request = self._request(step, components, process_groups, metadata)
        return perform_save(self._ranks, request, lambda: states_of(components))

    def save_async(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        process_groups: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        if self._saves is None:
            self._saves = BackgroundSaves(self._ranks)
        request = self._request(step, components, process_groups, metadata)
        self._saves.start(request, lambda: states_to_keep(self._ranks, request))

    def poll(self) -> str | None:
        return None if self._saves is None else self._saves.poll()

    def wait(self, timeout_s: float | None = None) -> str | None:
        return None if self._saves is None else self._saves.wait(timeout_s)

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
        return next((each.path for each in checkpoints_in(self.folder) if each.checkpoint_id == str(step)), None)

    def prune(self, *, keep: int, protect: Collection[str]) -> None:
        if not self._is_leader:
            return
        try:
            prune(self.folder, keep=keep, protect=protect)
        except (OSError, CheckpointError) as error:  # it fails no run
            _log.warning("%s: old checkpoints could not be deleted: %s", self.folder, error)

    def sweep(self) -> None:
        """Clears what an interrupted save or deletion has left."""
        if self._is_leader:
            for name in sweep(folder_at(self.folder)):
                _log.info("%s: cleared %s, which an interrupted save had left", self.folder, name)

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
