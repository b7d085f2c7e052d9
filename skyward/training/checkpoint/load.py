"""Load a checkpoint: all ranks first read and check everything that they need, and only then change any state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, CheckpointMismatch, CheckpointNotFound
from ...stores.folders import Folder, folder_at
from ..agree import Ranks
from .fence import writer_here
from .layout import manifest_at
from .manifest import FileEntry, Manifest
from .patterns import SharingPattern, StateComponent
from .retention import keep_for_loader
from .topology import Piece, RankPlace, RankTopology
from .verdicts import together
from .writer import read_state

if TYPE_CHECKING:
    from .sharded import ShardedFiles

_log = logging.getLogger(__name__)

Resharder = Callable[[Sequence[Any], int, int], Any]
"""Make one rank's state from the states of all ranks that wrote: `(states, rank, world_size) -> state`."""

_ONE = (SharingPattern.GLOBAL.value, SharingPattern.REPLICATED.value)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Result of a load on this rank.

    Args:
        path: folder or URL of the checkpoint.
        manifest: manifest of the checkpoint.
        loaded: keys of the loaded components.
        skipped: reasons of the components that were not loaded, by key.

    Example:
        report = coordinator.load_checkpoint(strict=False)
        print(report.step, report.loaded, report.skipped)
    """

    path: str
    manifest: Manifest
    loaded: tuple[str, ...]
    skipped: Mapping[str, str]

    @property
    def step(self) -> int | None:
        """Step of the checkpoint; None if its manifest names none."""
        return self.manifest.step


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """Arguments of one load.

    Args:
        components: components of the run.
        groups: ranks of this rank's groups, by name.
        strict: whether a required component that the checkpoint lacks is an error instead of a warning.
        only: keys to load; None: all.
        resharders: by key, as in `CheckpointCoordinator.load_checkpoint`.
        allow_pickle: load objects of any class.
    """

    components: Sequence[StateComponent]
    groups: Mapping[str, tuple[int, ...]]
    strict: bool = True
    only: Collection[str] | None = None
    resharders: Mapping[str, Resharder] = field(default_factory=dict)
    allow_pickle: bool = False


def perform_load(ranks: Ranks, request: LoadRequest, path: str) -> LoadReport:
    """Load the checkpoint at `path`, which is the same on all ranks. Collective.

    Raises:
        CheckpointNotFound: no checkpoint, or no required component. These errors are the same on all ranks, and come
            before any state changes.
        CheckpointCorrupt: a file is missing or changed.
        CheckpointMismatch: states do not fit this run, or the ranks see different checkpoints.
        CheckpointError: a `load_state_dict` failed on a rank; raised on all.
    """
    what = f"loading {path}"
    members = together(ranks, what, lambda: RankPlace.here(ranks.rank, request.groups), failure=CheckpointError)
    load = _Load(ranks, request, folder_at(path), RankTopology.of(members))
    # No state changes before every rank has read and checked its files.
    read = together(ranks, what, load.read, failure=CheckpointError)
    if len({rank.commit_id for rank in read}) > 1:
        raise CheckpointMismatch(
            f"{path}: ranks see different checkpoints at this path; use a shared disk, or set on_each_node=True",
            path=path,
        )
    # A component that one rank skips is skipped by all, so that replicas stay equal. Rank 0's reason is the one shown.
    reasons = {key: reason for rank in reversed(read) for key, reason in rank.skipped.items()}
    for component, files in load.sharded:
        if component.key not in reasons:
            # One phase each: torch's own load is collective, so all ranks have to enter it together.
            together(ranks, what, partial(files.read_into, component), failure=CheckpointError)
            load.loaded.append(component.key)
    together(ranks, what, lambda: load.apply(reasons), failure=CheckpointError)
    for key, reason in reasons.items():
        if ranks.rank == 0:
            _log.warning("%s: skipped %s: %s", path, key, reason)
    if ranks.rank == 0:
        keep_for_loader(folder_at(path), writer_here())
    return LoadReport(path=path, manifest=load.manifest, loaded=tuple(load.loaded), skipped=reasons)


@dataclass(frozen=True, kw_only=True)
class _Read:
    commit_id: str
    skipped: Mapping[str, str]


class _Load:
    manifest: Manifest

    def __init__(self, ranks: Ranks, request: LoadRequest, folder: Folder, topology: RankTopology) -> None:
        self._ranks, self._request, self._folder, self._topology = ranks, request, folder, topology
        self._states: dict[str, Any] = {}
        self.sharded: list[tuple[StateComponent, ShardedFiles]] = []
        self._skipped: dict[str, str] = {}
        self.loaded: list[str] = []

    def read(self) -> _Read:
        self.manifest = manifest_at(self._folder)
        for component in self._request.components:
            if self._request.only is None or component.key in self._request.only:
                self._read(component)
        return _Read(commit_id=self.manifest.commit_id, skipped=self._skipped)

    def apply(self, skipped: Mapping[str, str]) -> None:
        for component in self._request.components:
            if component.key in skipped or component.stateful is None:
                continue
            if component.key in self._states:
                component.stateful.load_state_dict(self._states.pop(component.key))
                self.loaded.append(component.key)

    def _read(self, component: StateComponent) -> None:
        files = self.manifest.files_of(component.key)
        if not files:
            self._lacks(component, "the checkpoint does not contain it")
            return
        if files[0].format == "dcp":
            from .sharded import ShardedFiles

            checked = ShardedFiles(self._ranks, self._folder, files, allow_pickle=self._request.allow_pickle)
            self.sharded.append((component, checked))  # all ranks load it together, whatever world size wrote it
            return
        piece = next((piece for piece in self._topology.pieces(component) if self._ranks.rank in piece.members), None)
        if piece is None:
            return
        if component.key in self._request.resharders:
            states = [self._state(entry) for entry in sorted(files, key=lambda entry: entry.index)]
            make = self._request.resharders[component.key]
            self._states[component.key] = make(states, self._ranks.rank, self._ranks.world_size)
            return
        file = self._file_for(component, piece, files)
        if file is not None:
            self._states[component.key] = self._state(file)

    def _state(self, file: FileEntry) -> Any:
        beside = self.manifest.files_of(file.component)
        return read_state(self._folder, file, beside=beside, allow_pickle=self._request.allow_pickle)

    def _file_for(self, component: StateComponent, piece: Piece, files: Sequence[FileEntry]) -> FileEntry | None:
        """Return the file that holds this rank's state, if one does."""
        written = self.manifest.components[component.key].sharing_pattern
        declared = component.sharing_pattern.value
        if written in _ONE and declared in _ONE:
            return files[0]
        here = self._topology.pieces(component)
        if written == declared or self.manifest.world_size == self._topology.world_size == 1:
            same = next((file for file in files if file.index == piece.index), None)
            # Equal numbers of states map by index: rank 3's to rank 3, node 1's to node 1. For other numbers only a
            # resharder knows what belongs together.
            count = _count(self.manifest, component.key, files)
            if count == len(here) and same is not None:
                return same
            if count == len(here):
                self._lacks(component, f"the checkpoint has no {piece.filename}")
                return None
            written_as = f"{_many(count, 'state')} of {_many(self.manifest.world_size, 'rank')}"
            why = f"it was written as {written_as}, and this run has {len(here)}"
            advice = "load it on as many ranks, pass resharders={...}, or leave it out with skip=[...]"
        else:
            # Another pattern fits only if it divides the ranks in the same way, such as one group of all ranks.
            exact = next((file for file in files if file.members == piece.members), None)
            if exact is not None and {file.members for file in files} == {place.members for place in here}:
                return exact
            why = f"it was written as {written}, and this run declares it {declared}"
            advice = "declare it as it was written, or leave it out with skip=[...]"
        text = f"{self._folder.path}: {component.key} does not fit: {why}; {advice}"
        if component.required or self._request.strict:
            raise CheckpointMismatch(text, path=self._folder.path)
        self._skipped[component.key] = why
        return None

    def _lacks(self, component: StateComponent, why: str) -> None:
        if component.required and self._request.strict:
            raise CheckpointNotFound(
                f"{self._folder.path}: {component.key} is required, but {why}; set strict=False to continue without it",
                path=self._folder.path,
            )
        self._skipped[component.key] = why


def _count(manifest: Manifest, key: str, files: Sequence[FileEntry]) -> int:
    """Return how many states a component was written as.

    Counting files would be wrong: on a disk of one node, only part of them are here.
    """
    pattern = manifest.components[key].sharing_pattern
    if pattern == SharingPattern.PER_RANK.value and manifest.world_size:
        return manifest.world_size
    if pattern == SharingPattern.PER_NODE.value and manifest.topology:
        return len(manifest.topology["nodes"])
    if pattern == SharingPattern.PER_GROUP.value and manifest.topology:
        return len(manifest.topology["groups"][manifest.components[key].group_name])
    return len({file.index for file in files})


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
