"""`checkpoint_manifest.json`, the contents of a checkpoint. It is written last, so a checkpoint with it is complete.

Version 2 has every key of version 1, and the files with their sizes and digests. Every version is readable. A manifest
with a commit number also has a digest of itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import CheckpointCorrupt
from ...stores.hashed_file import digest_of

MANIFEST = "checkpoint_manifest.json"
FORMAT_VERSION = 2
_ABOUT_A_SAVE = ("step", "epoch", "training_args_hash", "is_finite")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        path: path within the checkpoint, with `/`.
        component: key of the component.
        index: number of the piece among the component's; several files may belong to one piece.
        rank: rank that wrote it.
        members: ranks that hold the piece.
        bytes: size.
        digest: `xxh3:<128 bits>`, or empty.
        format: "torch", "safetensors", "shard" or "dcp".

    Example:
        for file in report.manifest.files:
            print(file.component, file.path, file.bytes)
    """

    path: str
    component: str
    index: int
    rank: int
    members: tuple[int, ...]
    bytes: int
    digest: str
    format: str = "torch"


@dataclass(frozen=True, kw_only=True)
class ComponentEntry:
    """One component, with the fields of version 1.

    Args:
        key: key of the component.
        sharing_pattern: value of its `SharingPattern`.
        ranks: ranks that wrote it.
        size_bytes: size of all its files.
        group_name: name of its process group, if any.
        replicated_across: ranks that share its single state; None if there are several states.
        checksum: digest of its only file; None if there are several.
        metadata: metadata of the component.
    """

    key: str
    sharing_pattern: str
    ranks: tuple[int, ...]
    size_bytes: int
    group_name: str | None = None
    replicated_across: tuple[int, ...] | None = None
    checksum: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint.

    Args:
        checkpoint_path: name of its folder when it was written.
        world_size: number of ranks that wrote it; 0 if unknown.
        timestamp: UTC, ISO 8601.
        components: components by key.
        format_version: version of the format.
        checkpoint_id: text after `checkpoint-` in its name.
        commit_id: identity of the save that wrote it.
        commit_number: the highest number in the folder before it, plus one. The newest checkpoint thus has the highest,
            whatever its machines' clocks show. 0 in manifests from before commit numbers.
        step: step of the run; None if unknown.
        epoch: epoch of the run; None if unknown.
        is_finite: whether its last loss and its weights were finite; None if unknown.
        files: all files.
        topology: nodes and groups, as ranks.
        training_args_hash: hash of the run's arguments, if the run passed one.
        skyward_version: version that wrote it.
        pytorch_version: version of torch that wrote it.
        metadata: plain values of the run.

    Example:
        manifest = coordinator.load_checkpoint().manifest
        print(manifest.step, manifest.total_bytes)
    """

    checkpoint_path: str
    world_size: int
    timestamp: str
    components: Mapping[str, ComponentEntry]
    format_version: int = FORMAT_VERSION
    checkpoint_id: str = ""
    commit_id: str = ""
    commit_number: int = 0
    step: int | None = None
    epoch: float | None = None
    is_finite: bool | None = None
    files: tuple[FileEntry, ...] = ()
    topology: Mapping[str, Any] = field(default_factory=dict)
    training_args_hash: str | None = None
    skyward_version: str = ""
    pytorch_version: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def files_of(self, component: str) -> tuple[FileEntry, ...]:
        """Return the files of a component."""
        return tuple(file for file in self.files if file.component == component)

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        if self.files:
            return sum(file.bytes for file in self.files)
        return sum(component.size_bytes for component in self.components.values())

    def to_json(self) -> bytes:
        raw = json.loads(json.dumps(asdict(self), default=str))
        if self.commit_number:
            raw["digest"] = _digest_of(raw)
        return (json.dumps(raw, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, *, where: str) -> Manifest:
        """Parse a manifest of any version; unknown keys are ignored.

        Raises:
            CheckpointCorrupt: it cannot be parsed, comes from a newer version, or has changed since it was written.
        """
        try:
            raw = json.loads(text)
            digest, expected = raw.pop("digest", None), _digest_of(raw)
            known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
            known["components"] = {
                key: _made(ComponentEntry, {"key": key, **component}) for key, component in raw["components"].items()
            }
            known["files"] = tuple(_made(FileEntry, file) for file in raw.get("files", ()))
            known["format_version"] = int(raw.get("format_version", 1))
            known["metadata"] = raw.get("metadata") or {}
            made = cls(**known)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise corrupt(where, f"the manifest cannot be read ({type(error).__name__}: {error})") from error
        if made.format_version > FORMAT_VERSION:
            raise CheckpointCorrupt(
                f"{where}: written in format {made.format_version}, but this version of skyward reads up to "
                f"{FORMAT_VERSION}; install a newer version",
                path=where,
            )
        if digest != expected and (digest or made.commit_number):
            changed = f"its digest is {expected}, but {digest} was written, so the file has changed"
            raise corrupt(f"{where}/{MANIFEST}", changed, path=where)
        return made


def corrupt(where: str, problem: str, *, path: str | None = None) -> CheckpointCorrupt:
    """Return the error of a damaged file. `path`: the checkpoint, if `where` is one of its files."""
    advice = "restore it, or resume from an earlier checkpoint"
    return CheckpointCorrupt(f"{where}: {problem}; {advice}", path=path or where)


def manifest_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Split a save's description into fields of a `Manifest` and its `metadata`.

    `step`, `epoch`, `training_args_hash` and `is_finite` are fields; everything else is metadata.
    """
    own = {name: metadata[name] for name in _ABOUT_A_SAVE if name in metadata}
    return {**own, "metadata": {name: value for name, value in metadata.items() if name not in own}}


def _digest_of(raw: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's values, independent of indentation and order."""
    return digest_of(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())


def _made(kind: Any, raw: Mapping[str, Any]) -> Any:
    values = {name: raw[name] for name in kind.__dataclass_fields__ if name in raw}
    for name in ("ranks", "members", "replicated_across"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    if "metadata" in values:
        values["metadata"] = values["metadata"] or {}
    if values.get("size_bytes", 0) is None:
        values["size_bytes"] = 0
    return kind(**values)
