"""`checkpoint_manifest.json`: what a checkpoint is made of. It is written last: a checkpoint that has it is whole.

Version 2 has every key of version 1, and the files with their sizes and digests. Every version is read. Since
manifests have a commit number, they also have a digest of themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import CheckpointCorrupt
from .hashed_file import digest_of

__all__ = ["FORMAT_VERSION", "MANIFEST", "ComponentEntry", "FileEntry", "Manifest", "manifest_fields"]

MANIFEST = "checkpoint_manifest.json"
FORMAT_VERSION = 2
_ABOUT_A_SAVE = ("step", "epoch", "training_args_hash", "is_finite")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """path: relative to the checkpoint, with `/`; digest: `xxh3:<128 bits>` or empty; index: of the piece that it is
    (part of) among the component's; members: the ranks that the piece is of; rank: which wrote it.
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
    """Version 1's fields of a component. ranks: those that wrote it; replicated_across: those that share a state."""

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
    """timestamp: UTC, ISO 8601. commit_id: another one for every save. topology: nodes and groups, as ranks.

    commit_number: one more than the highest that was there when the checkpoint was written, so the newest has the
        highest, whatever the clocks of its machines said; 0 in manifests from before there were numbers.
    is_finite: whether the last loss before it and its weights were; None where that is not known.
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
        return tuple(file for file in self.files if file.component == component)

    @property
    def total_bytes(self) -> int:
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
        """Of either version; keys that this one does not know are left out.

        Raises: CheckpointCorrupt, also where it is not as it was written.
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
            raise CheckpointCorrupt(
                f"{where}: the manifest cannot be read: {type(error).__name__}: {error}", path=where
            ) from error
        if made.format_version > FORMAT_VERSION:
            raise CheckpointCorrupt(
                f"{where}: written in format {made.format_version}, and this version of skyward reads up to "
                f"{FORMAT_VERSION}; use a newer one",
                path=where,
            )
        if digest != expected and (digest or made.commit_number):
            raise CheckpointCorrupt(
                f"{where}/{MANIFEST}: its digest is {expected}, and {digest} was written; somebody or something has "
                "changed it: restore the file, or delete the checkpoint",
                path=where,
            )
        return made


def manifest_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sort what a save is given about itself: `step`, `epoch`, `training_args_hash` and `is_finite` are fields of a
    `Manifest`, the rest is its `metadata`.
    """
    own = {name: metadata[name] for name in _ABOUT_A_SAVE if name in metadata}
    return {**own, "metadata": {name: value for name, value in metadata.items() if name not in own}}


def _digest_of(raw: Mapping[str, Any]) -> str:
    """Of a manifest's values, however they are indented and ordered."""
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
