"""Convert checkpoints of other layouts, and export to them. It runs no code of a checkpoint and changes no source."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, cast

import torch

from ..._version import __version__
from ...errors import CheckpointNotFound, UsageError
from ...stores.folders import Folder, folder_at
from .commit import discard, new_token, staging_in
from .inspection import states_in
from .layout import PREFIX, manifest_at, next_commit_number
from .manifest import MANIFEST, ComponentEntry, FileEntry, Manifest
from .sharded import read_whole, write_whole
from .writer import write_state

ExportFormat = Literal["safetensors", "torch", "dcp"]
_CHUNK = 8 << 20
_HF_FILES = {"optimizer.pt": "optimizer", "scheduler.pt": "scheduler", "scaler.pt": "scaler"}
_HF_ONLY = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def migrate_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keys: Mapping[str, str] | None = None,
    allow_pickle: bool = False,
) -> str:
    """Write a copy of a checkpoint in this library's layout.

    The source may have one of these layouts:

    - folders of `<key>_state[_rank_<r>|_group_...|_node_...].pt`, with a manifest of version 1 or without one,
    - Hugging Face: weights, optimizer.pt, scheduler.pt and scaler.pt (the state of its own run is left out),
    - torch.distributed.checkpoint: its top-level dicts become components; otherwise all of it becomes `model`.

    Args:
        source: folder or URL of the checkpoint.
        target: folder or URL of the copy.
        keys: new names of components, by their old ones.
        allow_pickle: load objects of any class from torch.distributed.checkpoint, which can run code. The other layouts
            are copied and not loaded.

    Returns:
        The path of the copy.

    Raises:
        CheckpointNotFound: the source has none of these layouts.
        UsageError: an object needs `allow_pickle`.

    Example:
        migrate_checkpoint("hf-run/checkpoint-500", "out/checkpoint-500", keys={"scheduler": "lr_scheduler"})
    """
    folder = folder_at(source)
    names = folder.names()
    if ".metadata" in names:
        parts = _of_dcp(folder, allow_pickle=allow_pickle)
        return _write(target, parts, metadata={"migrated_from": "dcp"}, keys=keys or {})
    if MANIFEST not in names and any(name in names for name in (*_HF_ONLY, *_HF_FILES)):
        return _write(target, _of_hf(folder, names), metadata=_hf_metadata(folder, names), keys=keys or {})
    manifest = manifest_at(folder)
    parts = [_Part.copied(folder, file.path, file, manifest.components[file.component]) for file in manifest.files]
    return _write(target, parts, metadata=manifest.metadata, keys=keys or {}, world_size=manifest.world_size)


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: ExportFormat = "safetensors",
    components: tuple[str, ...] = ("model",),
    allow_pickle: bool = False,
) -> str:
    """Write components of a checkpoint for other libraries, and return the path.

    Args:
        source: folder or URL of the checkpoint.
        target: file or folder to write; see `to`.
        to: "safetensors" writes `target/model.safetensors`, which `from_pretrained` reads beside a config.json. "torch"
            writes one file `target`, a dict of the states by their keys. "dcp" writes a folder of
            torch.distributed.checkpoint.
        components: keys of the components, or `key[index]` for one of several states.
        allow_pickle: load objects of any class, which can run code.

    Returns:
        The path of the target.

    Raises:
        CheckpointNotFound: the checkpoint lacks a component.
        UsageError: a component has a state of each rank, and the key does not select one.

    Example:
        export_checkpoint("out/checkpoint-500", "exported", to="safetensors")
    """
    states = states_in(source, allow_pickle=allow_pickle)
    chosen: dict[str, Any] = {}
    for key in components:
        if key not in states:
            several = [name for name in states if name.startswith(f"{key}[")]
            if several:
                raise UsageError(f"components={key!r}: has {len(several)} states; pick one, such as {several[0]!r}")
            raise CheckpointNotFound(
                f"components={key!r}: not in {source}; use one of {sorted(states)}", path=os.fspath(source)
            )
        chosen[key] = states[key]()
    place = folder_at(target)
    if to == "safetensors":
        for key, state in chosen.items():
            write_state(place, f"{key}.safetensors", state, kind="safetensors")
    elif to == "torch":
        above, name = place.parent()
        with above.create(name) as file:
            torch.save(chosen, cast("Any", file))
    else:
        write_whole(place, chosen)
    return os.fspath(target)


@dataclass(frozen=True)
class _Part:
    """One file of the new checkpoint, and the function that fills it."""

    entry: FileEntry
    component: ComponentEntry
    fill: Callable[[Folder, FileEntry], FileEntry]

    @classmethod
    def copied(cls, source: Folder, name: str, entry: FileEntry, component: ComponentEntry) -> _Part:
        """Make a part that copies the file byte by byte, so that no pickle is loaded."""

        def fill(folder: Folder, new: FileEntry) -> FileEntry:
            with folder.create(new.path) as file, source.open(name) as old:
                shutil.copyfileobj(old, file, _CHUNK)
            return replace(new, bytes=file.bytes, digest=file.digest)

        return cls(entry, component, fill)

    @classmethod
    def made(cls, key: str, state: Any, *, allow_pickle: bool) -> _Part:
        def fill(folder: Folder, new: FileEntry) -> FileEntry:
            size, digest = write_state(folder, new.path, state, key=key, allow_pickle=allow_pickle)
            return replace(new, bytes=size, digest=digest)

        return cls(_entry(f"{key}_state.pt", key, "torch"), _component(key), fill)


def _write(
    target: str | os.PathLike[str],
    parts: list[_Part],
    *,
    metadata: Mapping[str, Any],
    keys: Mapping[str, str],
    world_size: int = 1,
) -> str:
    parent, name = folder_at(target).parent()
    staging = staging_in(parent, name, new_token())
    staging.begin()
    files: list[FileEntry] = []
    components: dict[str, ComponentEntry] = {}
    try:
        for part in parts:
            key = keys.get(part.entry.component, part.entry.component)
            old = f"{part.entry.component}_state"
            path = part.entry.path
            if path.startswith(old):
                path = f"{key}_state{path.removeprefix(old)}"
            entry = part.fill(staging.folder, replace(part.entry, component=key, path=path))
            files.append(replace(entry, path=staging.prefix + path))
            size = entry.bytes + (components[key].size_bytes if key in components else 0)
            components[key] = replace(part.component, key=key, size_bytes=size)
        text = name.removeprefix(PREFIX)
        manifest = Manifest(
            checkpoint_path=name,
            world_size=world_size or 1,
            timestamp=datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            components=components,
            checkpoint_id=text,
            commit_id=uuid.uuid4().hex[:12],
            commit_number=next_commit_number(parent),
            step=int(text) if text.isdigit() else metadata.get("global_step"),
            files=tuple(files),
            skyward_version=__version__,
            pytorch_version=torch.__version__,
            metadata=dict(metadata),
        )
        return staging.commit(manifest)
    except BaseException:
        discard(staging)
        raise


def _of_dcp(folder: Folder, *, allow_pickle: bool) -> list[_Part]:
    state = read_whole(folder, allow_pickle=allow_pickle)
    if state and all(isinstance(item, dict) for item in state.values()):
        return [_Part.made(str(key), item, allow_pickle=allow_pickle) for key, item in state.items()]
    return [_Part.made("model", state, allow_pickle=allow_pickle)]


def _of_hf(folder: Folder, names: list[str]) -> list[_Part]:
    parts = []
    if "model.safetensors.index.json" in names:
        with folder.open("model.safetensors.index.json") as file:
            shards = sorted(set(json.loads(file.read())["weight_map"].values()))
        for name in ("model.safetensors.index.json", *shards):
            entry = _entry(name, "model", "safetensors" if name.endswith(".json") else "shard")
            parts.append(_Part.copied(folder, name, entry, _component("model")))
    elif "model.safetensors" in names:
        entry = _entry("model.safetensors", "model", "safetensors")
        parts.append(_Part.copied(folder, entry.path, entry, _component("model")))
    elif "pytorch_model.bin" in names:
        parts.append(_renamed(folder, "pytorch_model.bin", "model"))
    return [*parts, *(_renamed(folder, name, key) for name, key in _HF_FILES.items() if name in names)]


def _renamed(folder: Folder, name: str, key: str) -> _Part:
    return _Part.copied(folder, name, _entry(f"{key}_state.pt", key, "torch"), _component(key))


def _hf_metadata(folder: Folder, names: list[str]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"migrated_from": "transformers"}
    if "trainer_state.json" in names:
        with folder.open("trainer_state.json") as file:
            state = json.loads(file.read())
        metadata |= {key: state[key] for key in ("global_step", "epoch", "best_metric") if key in state}
    return metadata


def _entry(name: str, key: str, kind: str) -> FileEntry:
    return FileEntry(path=name, component=key, index=0, rank=0, members=(0,), bytes=0, digest="", format=kind)


def _component(key: str) -> ComponentEntry:
    return ComponentEntry(key=key, sharing_pattern="global", ranks=(0,), size_bytes=0)
