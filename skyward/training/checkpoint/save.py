"""One save, from states to a committed checkpoint, in the caller's thread or in one of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..._version import __version__
from ...errors import UsageError
from ...stores.folders import folder_at
from ..agree import Ranks
from ..nested import leaves_of
from ..parts import is_dtensor
from .commit import Staging, discard, new_token, staging_in
from .fence import AttemptWriter, explaining, fence_of, writer_here
from .finite import losses_are_finite
from .layout import name_of, next_commit_number
from .manifest import ComponentEntry, FileEntry, Manifest
from .notes import note_save
from .patterns import SharingPattern, StateComponent, ValidationLevel
from .topology import Piece, RankPlace, RankTopology
from .validate import close_to, differing, fingerprints, mismatch, summary_of
from .verdicts import together
from .writer import write_state


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Arguments of one save on this rank.

    Args:
        components: components of the run.
        groups: ranks of this rank's groups, by name.
        parent: folder that holds the checkpoint's folder.
        name: name of the checkpoint's folder.
        compare_all: compare replicas even if a component does not ask for it.
        on_each_node: write shared states on every node.
        allow_pickle: write objects of any class, which load with `allow_pickle` only.
        about: further fields of the manifest; those of the committing rank count.
        writer: attempt that saves; None for no fence.
    """

    components: Sequence[StateComponent]
    groups: Mapping[str, tuple[int, ...]]
    parent: str
    name: str
    compare_all: bool = False
    on_each_node: bool = False
    allow_pickle: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    writer: AttemptWriter | None = field(default_factory=writer_here)

    def is_compared(self, component: StateComponent) -> bool:
        if component.validation_level is ValidationLevel.NONE:
            return False
        has_replicas = component.sharing_pattern not in (SharingPattern.GLOBAL, SharingPattern.PER_RANK)
        return component.is_compared or (self.compare_all and has_replicas)


@dataclass(frozen=True, kw_only=True)
class _Announced:
    member: RankPlace
    components: tuple[tuple[Any, ...], ...]
    summaries: Mapping[str, str]
    sharded: frozenset[str]
    name: str
    token: str
    is_finite: bool | None


def states_of(components: Sequence[StateComponent]) -> dict[str, Any]:
    """Return the components' state dicts, by key. Collective if a `state_dict()` is."""
    return {
        component.key: component.stateful.state_dict() for component in components if component.stateful is not None
    }


def states_to_keep(ranks: Ranks, request: SaveRequest) -> dict[str, Any]:
    """Return the state dicts that this rank writes or compares; the others need no snapshot."""
    states = states_of(request.components)
    if ranks.rank == 0 or request.on_each_node:
        return states
    return {
        component.key: states[component.key]
        for component in request.components
        if component.key in states
        and (
            component.sharing_pattern not in (SharingPattern.GLOBAL, SharingPattern.REPLICATED)
            or request.is_compared(component)
            or is_sharded(states[component.key])
        )
    }


def perform_save(ranks: Ranks, request: SaveRequest, states_here: Callable[[], Mapping[str, Any]]) -> str:
    """Save and return the checkpoint's path. Collective.

    `states_here` returns the states of this rank; an error in it fails the save on all ranks.

    Raises:
        CheckpointSaveFailed: a rank could not write. All errors are raised on all ranks; no file is left behind, and an
            earlier checkpoint of that name stays as it was.
        CheckpointSuperseded: a newer attempt of this job saves in the folder.
        ReplicationMismatch: replicas differ.
        UsageError: a state cannot be loaded again, or the ranks declare different components.
    """
    save = _Save(ranks, request)
    return save.run(states_here)


class _Save:
    _topology: RankTopology
    _pieces: Mapping[str, tuple[Piece, ...]]
    """Pieces by component."""
    _sharded: frozenset[str]
    """Keys of the components that have DTensors on any rank."""

    def __init__(self, ranks: Ranks, request: SaveRequest) -> None:
        self._ranks, self._request, self._what = ranks, request, f"saving {request.name}"
        self._states: Mapping[str, Any] = {}
        self._prints: dict[str, dict[str, str]] = {}
        self._fence = fence_of(request.writer, folder_at(request.parent))

    def run(self, states_here: Callable[[], Mapping[str, Any]]) -> str:
        began_s = time.monotonic()
        announced = together(self._ranks, self._what, lambda: self._announce(states_here))
        first = announced[0]
        verdicts = [rank.is_finite for rank in announced if rank.is_finite is not None]
        about = {**self._request.about, "is_finite": all(verdicts) if verdicts else None}
        self._topology = RankTopology.of([rank.member for rank in announced])
        self._check_components(announced)
        self._pieces = {component.key: self._topology.pieces(component) for component in self._request.components}
        self._sharded = frozenset().union(*(rank.sharded for rank in announced))
        self._compare(announced)
        staging = staging_in(folder_at(self._request.parent), first.name, first.token)
        leader = self._leaders()[self._ranks.rank]
        is_leader = leader == self._ranks.rank
        try:
            # A phase of its own, because other ranks write into the folder that the leader makes. With a disk on each
            # node every leader counts for itself; the highest number keeps the order right on all of them.
            numbers = together(self._ranks, self._what, lambda: self._begin(staging) if is_leader else 0)
            files = [file for file, at in self._write(staging) if at == leader]
            manifest = self._manifest(first, files, about={**about, "commit_number": max(numbers)})
            # All ranks have passed the previous phase, so every file is flushed before any manifest names it.
            paths = together(self._ranks, self._what, lambda: self._commit(staging, manifest) if is_leader else "")
        except Exception:
            # `together` raises on all ranks, so none writes any longer, and the files can go.
            if is_leader:
                discard(staging)
            raise
        if self._ranks.rank == 0:
            note_save(paths[leader], about.get("step"), manifest.total_bytes, time.monotonic() - began_s)
        return paths[leader]

    # Phases ----------------------------------------------------------------------------------------------------------

    def _begin(self, staging: Staging) -> int:
        """Begin the staging, and return the number of this commit according to this rank's disk."""
        parent = folder_at(self._request.parent)
        if self._request.writer is not None:
            self._request.writer.record(parent)
        staging.begin()
        with explaining(self._fence):
            return next_commit_number(parent)

    def _commit(self, staging: Staging, manifest: Manifest) -> str:
        with explaining(self._fence):
            return staging.commit(manifest, self._fence)

    def _announce(self, states_here: Callable[[], Mapping[str, Any]]) -> _Announced:
        request = self._request
        self._states = states_here()
        for component in request.components:
            if request.is_compared(component) and component.key in self._states:
                state = self._states[component.key]
                self._prints[component.key] = fingerprints(state, component.validation_level)
        return _Announced(
            member=RankPlace.here(self._ranks.rank, request.groups),
            components=tuple(
                (
                    component.key,
                    component.sharing_pattern.value,
                    component.process_group_name,
                    request.is_compared(component),
                )
                for component in request.components
            ),
            summaries={key: summary_of(prints) for key, prints in self._prints.items()},
            sharded=frozenset(key for key, state in self._states.items() if is_sharded(state)),
            name=request.name,
            token=new_token("" if request.writer is None else request.writer.tag),
            is_finite=self._is_finite(),
        )

    def _is_finite(self) -> bool | None:
        """Return what this rank passed, or what its metrics tell. A tensor makes this thread wait for its device."""
        about = self._request.about
        passed = about.get("is_finite")
        if passed is None:
            return losses_are_finite(about.get("metadata", {}).get("metrics", {}))
        return bool(passed)

    def _check_components(self, announced: Sequence[_Announced]) -> None:
        for rank, announcement in enumerate(announced):
            if announcement.components != announced[0].components:
                raise UsageError(
                    f"components=[...]: rank {rank} declares {_brief(announcement)}, but rank 0 declares "
                    f"{_brief(announced[0])}; declare the same on all ranks, in the same order"
                )

    def _compare(self, announced: Sequence[_Announced]) -> None:
        suspects = [
            (component, piece)
            for component in self._request.components
            if self._request.is_compared(component) and component.key not in self._sharded
            for piece in self._pieces[component.key]
            if len({announced[rank].summaries.get(component.key) for rank in piece.members}) > 1
        ]
        # All ranks have the same suspects and exchange something for each, so none may raise before the last of them.
        mismatches = [
            mismatch(component, piece, differences)
            for component, piece in suspects
            if (differences := self._differences(component, piece))
        ]
        if mismatches:
            raise mismatches[0]

    def _differences(self, component: StateComponent, piece: Piece) -> list[tuple[int, list[str]]]:
        """Return the paths in which each rank of a piece differs from the first, for ranks that have any."""
        is_member = self._ranks.rank in piece.members
        own = self._prints.get(component.key, {}) if is_member else {}
        prints = together(self._ranks, self._what, lambda: own)
        paths = {rank: differing(prints[rank], prints[piece.writer]) for rank in piece.members}
        if component.validation_level is ValidationLevel.FULL:
            leaves = dict(leaves_of(self._states.get(component.key, {}))) if is_member else {}
            for path in dict.fromkeys(path for differing_paths in paths.values() for path in differing_paths):
                values = together(self._ranks, self._what, lambda path=path: _on_cpu(leaves.get(path)))  # type: ignore[misc]
                for rank in piece.members:
                    if path in paths[rank] and close_to(values[rank], values[piece.writer]):
                        paths[rank].remove(path)
        return [(rank, differing_paths) for rank, differing_paths in paths.items() if differing_paths]

    def _write(self, staging: Staging) -> list[tuple[FileEntry, int]]:
        """Write this rank's files, and return every rank's files with the rank whose manifest names them."""
        written: list[tuple[FileEntry, int]] = []
        for component in self._request.components:
            if component.key in self._sharded:
                from .sharded import write_sharded

                state = self._states.get(component.key)
                allow_pickle = self._request.allow_pickle
                entries = write_sharded(
                    self._ranks, self._what, staging, component.key, state, allow_pickle=allow_pickle
                )
                written += [(entry, 0) for entry in entries]

        def write() -> list[FileEntry]:
            with explaining(self._fence):
                return [
                    self._write_piece(staging, component, piece)
                    for component in self._request.components
                    if component.key not in self._sharded
                    for piece in self._pieces[component.key]
                    if self._ranks.rank in self._writers(piece)
                ]

        leaders = self._leaders()
        for rank, entries in enumerate(together(self._ranks, self._what, write)):
            written += [(entry, leaders[rank]) for entry in entries]
        return written

    def _write_piece(self, staging: Staging, component: StateComponent, piece: Piece) -> FileEntry:
        if component.key not in self._states:
            raise UsageError(
                f"stateful=None: rank {self._ranks.rank} has to write StateComponent {component.key!r}; "
                "pass the object on the ranks that write it"
            )
        kind = str(component.metadata.get("format", "torch"))
        name = piece.filename if kind == "torch" else piece.filename.replace("_state", "").replace(".pt", f".{kind}")
        size, digest = write_state(
            staging.folder,
            name,
            self._states[component.key],
            kind=kind,
            key=component.key,
            allow_pickle=self._request.allow_pickle,
        )
        return FileEntry(
            path=f"{staging.prefix}{name}",
            component=component.key,
            index=piece.index,
            rank=self._ranks.rank,
            members=piece.members,
            bytes=size,
            digest=digest,
            format=kind,
        )

    # Duties of ranks --------------------------------------------------------------------------------------------------

    def _leaders(self) -> list[int]:
        """Return, for each rank, the rank that commits its files."""
        if not self._request.on_each_node:
            return [0] * self._topology.world_size
        first = {rank: node[0] for node in self._topology.nodes for rank in node}
        return [first[rank] for rank in range(self._topology.world_size)]

    def _writers(self, piece: Piece) -> list[int]:
        if not self._request.on_each_node:
            return [piece.writer]
        firsts = (next((rank for rank in node if rank in piece.members), None) for node in self._topology.nodes)
        return [rank for rank in firsts if rank is not None]

    def _manifest(self, first: _Announced, files: Sequence[FileEntry], *, about: Mapping[str, Any]) -> Manifest:
        import torch

        return Manifest(
            **{
                "checkpoint_path": first.name,
                "world_size": self._topology.world_size,
                "timestamp": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
                "components": {
                    component.key: _entry(component, files, self._topology) for component in self._request.components
                },
                "checkpoint_id": first.name.removeprefix(name_of("")),
                "commit_id": first.token.partition(".")[0],
                "files": tuple(files),
                "topology": self._topology.as_json(),
                "skyward_version": __version__,
                "pytorch_version": torch.__version__,
                **about,
            }
        )


def _entry(component: StateComponent, files: Sequence[FileEntry], topology: RankTopology) -> ComponentEntry:
    own = [file for file in files if file.component == component.key]
    is_shared = component.sharing_pattern is not SharingPattern.PER_RANK
    return ComponentEntry(
        key=component.key,
        sharing_pattern=component.sharing_pattern.value,
        ranks=tuple(sorted({file.rank for file in own})),
        size_bytes=sum(file.bytes for file in own),
        group_name=component.process_group_name,
        replicated_across=tuple(range(topology.world_size)) if is_shared and len(own) == 1 else None,
        checksum=own[0].digest if len(own) == 1 else None,
        metadata=dict(component.metadata),
    )


def is_sharded(state: Any) -> bool:
    """Return whether a state has DTensors, which torch.distributed.checkpoint writes."""
    return any(is_dtensor(leaf) for _, leaf in leaves_of(state))


def _on_cpu(leaf: Any) -> Any:
    detach = getattr(leaf, "detach", None)
    return detach().cpu() if callable(detach) else leaf


def _brief(announced: _Announced) -> str:
    return ", ".join(f"{key} {pattern}" for key, pattern, *_ in announced.components) or "none"
