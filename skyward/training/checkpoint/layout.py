"""Names of checkpoints, the places to look for them, and the files of those without a manifest of this library.

They are written to `output_dir/checkpoint-<id>`. Those in `output_dir/checkpoints/checkpoint-<id>` are read too.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ...errors import CheckpointNotFound
from ...stores.folders import Folder, LocalFolder, folder_at
from .manifest import MANIFEST, ComponentEntry, FileEntry, Manifest

_log = logging.getLogger(__name__)

PREFIX = "checkpoint-"
STAGING, OLD = ".tmp-", ".old-"
_FILE = re.compile(
    r"(?P<key>.+?)_state(?:_rank_(?P<rank>\d+)|_node_(?P<node>\d+)_rank_(?P<node_rank>\d+)"
    r"|_group_(?P<group>.+)_grank_\d+_rank_(?P<group_rank>\d+))?\.pt"
)
_WEIGHTS = (
    ("model.safetensors", "safetensors"),
    ("model.safetensors.index.json", "safetensors"),
    ("pytorch_model.bin", "torch"),
)


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A complete checkpoint.

    Args:
        path: folder or URL.
        checkpoint_id: text after `checkpoint-` in its name.
        step: its id as a number; None if it is not one.
        written_s: time of its manifest, in seconds since the epoch.
        manifest: the manifest as it was written; `manifest_at` adds the files of an old one.
    """

    path: str
    checkpoint_id: str
    step: int | None
    written_s: float
    manifest: Manifest = field(repr=False)

    @property
    def is_sound(self) -> bool:
        """Return whether a run may resume from it: False if its last loss or weights are known to be non-finite."""
        return self.manifest.is_finite is not False


def name_of(checkpoint_id: str | int) -> str:
    """Return the folder name of a checkpoint."""
    return f"{PREFIX}{checkpoint_id}"


def checkpoints_in(output_dir: str | os.PathLike[str]) -> list[FoundCheckpoint]:
    """Return the complete checkpoints of a run in the order of their commits, oldest first.

    Commit numbers give the order. Manifests from before commit numbers come first, by time and step. Steps alone do not
    suffice: after a run went back to step 100 and continued, its newest checkpoint does not have the highest step. Nor
    do clocks: two machines that write to one disk may be minutes apart. Folders without a manifest are ignored.

    Args:
        output_dir: folder or URL with the checkpoints.

    Raises:
        CheckpointCorrupt: a manifest is damaged, so it is unknown whether that checkpoint is the newest.

    Example:
        for checkpoint in checkpoints_in("out"):
            print(checkpoint.step, checkpoint.path)
    """
    checkpoints = [
        _checkpoint_at(at, Manifest.from_json(text, where=at)) for at, text in _manifests_in(folder_at(output_dir))
    ]
    return sorted(checkpoints, key=_order)


def _order(checkpoint: FoundCheckpoint) -> tuple[int, float, int]:
    step = -1 if checkpoint.step is None else checkpoint.step
    return checkpoint.manifest.commit_number, checkpoint.written_s, step


def put_back(folder: Folder) -> None:
    """Put back checkpoints that older versions renamed to `.old-...` and were killed before they replaced them.

    Call it before anything looks for checkpoints.
    """
    if not isinstance(folder, LocalFolder):
        return
    for name in folder.names():
        final = Path(folder.path, name[len(OLD) :].rpartition("-")[0])
        if not name.startswith(OLD) or final.exists():
            continue
        try:
            Path(folder.path, name).rename(final)
        except OSError as error:
            if not final.exists():  # another process may have put it back first
                _log.warning("%s/%s: could not put it back to %s: %s", folder.path, name, final.name, error)


def next_commit_number(root: Folder) -> int:
    """Return the highest commit number in the folder plus one; a damaged manifest counts as far as it is readable."""
    highest = 0
    for _, text in _manifests_in(root):
        try:
            number = json.loads(text)["commit_number"]
        except (ValueError, KeyError, TypeError):  # damaged: it contributes no number
            continue
        if isinstance(number, int):
            highest = max(highest, number)
    return highest + 1


def manifest_at(folder: Folder) -> Manifest:
    """Return the manifest of a checkpoint.

    The files of an older manifest are added from their names. A checkpoint without one gets a manifest made from them.

    Raises:
        CheckpointNotFound: the folder has no part of a checkpoint.
        CheckpointCorrupt: the manifest is damaged.
    """
    names = folder.names()
    if not names and isinstance(folder, LocalFolder):
        put_back(folder.parent()[0])
        names = folder.names()
    if MANIFEST in names:
        text = folder.read([MANIFEST]).get(MANIFEST, b"")
        manifest = Manifest.from_json(text, where=folder.path)
        if manifest.format_version >= 2:
            return manifest
    else:
        manifest = Manifest(checkpoint_path=folder.path, world_size=0, timestamp="", components={}, format_version=0)
    files = tuple(_legacy_files(folder, names))
    if not files:
        raise CheckpointNotFound(
            f"{folder.path}: no checkpoint is there (neither {MANIFEST} nor <key>_state.pt); list those of a run with "
            "`skyward checkpoint ls DIR`",
            path=folder.path,
        )
    components = dict(manifest.components)
    for file in files:
        if file.component not in components:
            components[file.component] = _legacy_component(file, files)
    ranks = [file.rank for file in files if _pattern(file.path) == "per_rank"]
    world_size = manifest.world_size or (max(ranks) + 1 if ranks else 0)
    return Manifest(
        checkpoint_path=folder.path,
        world_size=world_size,
        timestamp=manifest.timestamp,
        components=components,
        format_version=manifest.format_version,
        step=_step_of(folder.path),
        files=files,
        training_args_hash=manifest.training_args_hash,
        pytorch_version=manifest.pytorch_version,
        metadata=manifest.metadata,
    )


def _manifests_in(root: Folder) -> Iterator[tuple[str, bytes]]:
    """Yield the path of each checkpoint with its manifest."""
    put_back(root)
    names = root.names()
    yield from _manifests_of(root, names)
    if "checkpoints" in names:
        older = root.child("checkpoints")
        put_back(older)
        yield from _manifests_of(older, older.names())


def _manifests_of(folder: Folder, names: list[str]) -> Iterator[tuple[str, bytes]]:
    files = [f"{name}/{MANIFEST}" for name in names if name.startswith(PREFIX)]
    for file, text in folder.read(files).items():
        yield folder.child(file.partition("/")[0]).path, text


def _step_of(path: str) -> int | None:
    text = path.rpartition("/")[2].removeprefix(PREFIX)
    return int(text) if text.isdecimal() else None


def _checkpoint_at(path: str, manifest: Manifest) -> FoundCheckpoint:
    return FoundCheckpoint(
        path=path,
        checkpoint_id=path.rpartition("/")[2].removeprefix(PREFIX),
        step=_step_of(path),
        written_s=_written_s(manifest),
        manifest=manifest,
    )


def _written_s(manifest: Manifest) -> float:
    when = datetime.fromisoformat(manifest.timestamp.replace("Z", "+00:00"))
    if when.tzinfo is None and manifest.format_version >= 2:
        when = when.replace(tzinfo=UTC)  # version 1 wrote local time
    return when.timestamp()


def _legacy_files(folder: Folder, names: list[str]) -> list[FileEntry]:
    entries = []
    groups: dict[str, int] = {}
    for name in names:
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        key, rank, index = match["key"], 0, 0
        if match["rank"]:
            rank = index = int(match["rank"])
        elif match["node"]:
            rank, index = int(match["node_rank"]), int(match["node"])
        elif match["group"]:
            rank, index = int(match["group_rank"]), -1
            groups[key] = groups.get(key, 0) + 1
        entries.append(_entry(folder, name, key, index=index, rank=rank))
    for key in groups:  # number the groups by rank, as numbers and not as text
        of_groups = sorted((file for file in entries if file.component == key), key=lambda file: file.rank)
        entries = [file for file in entries if file.component != key] + [
            _entry(folder, of_group.path, key, index=at, rank=of_group.rank) for at, of_group in enumerate(of_groups)
        ]
    if not any(file.component == "model" for file in entries):
        weights = next((kind for kind in _WEIGHTS if kind[0] in names), None)
        if weights is not None:
            entries.append(_entry(folder, weights[0], "model", index=0, rank=0, kind=weights[1]))
    return entries


def _entry(folder: Folder, name: str, key: str, *, index: int, rank: int, kind: str = "torch") -> FileEntry:
    return FileEntry(
        path=name, component=key, index=index, rank=rank, members=(), bytes=folder.size(name), digest="", format=kind
    )


def _legacy_component(file: FileEntry, files: tuple[FileEntry, ...]) -> ComponentEntry:
    own = [entry for entry in files if entry.component == file.component]
    return ComponentEntry(
        key=file.component,
        sharing_pattern=_pattern(file.path),
        ranks=tuple(entry.rank for entry in own),
        size_bytes=sum(entry.bytes for entry in own),
    )


def _pattern(name: str) -> str:
    match = _FILE.fullmatch(name)
    if match is None:
        return "global"
    for part, pattern in (("rank", "per_rank"), ("node", "per_node"), ("group", "per_group")):
        if match[part]:
            return pattern
    return "global"
