"""Looks at checkpoints without a run: whether one is whole and unchanged, and how two differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError
from ..nested import leaves_of
from .folders import folder_at
from .layout import manifest_at
from .manifest import MANIFEST, Manifest
from .sharded import read_whole
from .validate import digest_of
from .writer import check_file, read_state

__all__ = ["Difference", "differences", "problems", "states_in"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """what: "only in the first", "only in the second", or how the values differ."""

    component: str
    path: str
    what: str


def problems(path: str | os.PathLike[str], *, digests: bool = True) -> list[str]:
    """What is wrong with a checkpoint: files that are missing, changed, cut, or that no manifest names. Runs nothing.

    digests: read every file; else only sizes are compared.
    Raises: CheckpointNotFound, CheckpointCorrupt where not even its manifest can be read.
    """
    folder = folder_at(path)
    manifest = manifest_at(folder)
    found = []
    for entry in manifest.files:
        try:
            check_file(folder, entry, digest=digests)
        except CheckpointError as error:
            found.append(str(error))
    for key, component in manifest.components.items():
        if not manifest.files_of(key):
            found.append(f"{key}: the manifest names it ({component.sharing_pattern}), and no file of it")
    named = {file.path for file in manifest.files} | {MANIFEST}
    if manifest.format_version >= 2:
        found += [f"{folder.path}/{name}: no manifest names it" for name in folder.walk() if name not in named]
    return found


def differences(
    first: str | os.PathLike[str], second: str | os.PathLike[str], *, allow_pickle: bool = False
) -> Iterator[Difference]:
    """Between the states of two checkpoints, leaf by leaf. Tensors: how far their values are apart at most."""
    one, other = states_in(first, allow_pickle=allow_pickle), states_in(second, allow_pickle=allow_pickle)
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other:
            yield Difference(component=name, path="", what=_only_in(name in one))
            continue
        mine, theirs = dict(leaves_of(one[name]())), dict(leaves_of(other[name]()))
        for path in dict.fromkeys((*mine, *theirs)):
            if path not in mine or path not in theirs:
                yield Difference(component=name, path=path, what=_only_in(path in mine))
            elif digest_of(mine[path]) != digest_of(theirs[path]):
                yield Difference(component=name, path=path, what=_how(mine[path], theirs[path]))


def states_in(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> dict[str, Any]:
    """By component (`key`, or `key[index]` where it has several states), a function that reads the state."""
    folder = folder_at(path)
    manifest = manifest_at(folder)
    found: dict[str, Any] = {}
    for key in dict.fromkeys(file.component for file in manifest.files):
        files = manifest.files_of(key)
        if files[0].format == "dcp":
            written = folder.child(files[0].path.rpartition("/")[0])
            found[key] = lambda written=written: read_whole(written, allow_pickle=allow_pickle)
            continue
        states = [file for file in files if file.format != "shard"]
        for entry in states:
            name = key if len(states) == 1 else f"{key}[{entry.index}]"
            found[name] = lambda entry=entry, files=files: read_state(
                folder, entry, beside=files, allow_pickle=allow_pickle
            )
    return found


def describe(manifest: Manifest) -> list[tuple[str, str, str, str, int]]:
    """Rows of a table: component, pattern, who wrote it, format, bytes."""
    rows = []
    for key, component in manifest.components.items():
        files = manifest.files_of(key)
        formats = ", ".join(sorted({file.format for file in files}))
        size = sum(file.bytes for file in files) or component.size_bytes
        rows.append((key, component.sharing_pattern, _ranks(component.ranks), formats, size))
    return rows


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _only_in(is_first: bool) -> str:
    return f"only in the {'first' if is_first else 'second'}"


def _how(one: Any, other: Any) -> str:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return f"{one!r:.60} and {other!r:.60}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    apart = (one.double() - other.double()).abs() if not one.is_complex() else (one - other).abs()
    return f"{int((apart != 0).sum())} of {one.numel()} elements, at most {float(apart.max()):.3g} apart"
