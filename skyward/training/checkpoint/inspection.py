"""Inspect checkpoints without a run: check that one is complete and unchanged, or compare two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError
from ...stores.folders import folder_at
from ..nested import leaves_of
from .layout import manifest_at
from .manifest import MANIFEST, Manifest
from .sharded import read_whole
from .validate import digest_of
from .writer import check_file, read_state


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference between two checkpoints.

    Args:
        component: key of the component.
        path: path of the leaf in the component's state; empty if the whole component differs.
        what: "only in the first", "only in the second", or a description of how the values differ.

    Example:
        for difference in differences("out/checkpoint-100", "out/checkpoint-200"):
            print(difference.component, difference.path, difference.what)
    """

    component: str
    path: str
    what: str


def problems(path: str | os.PathLike[str], *, digests: bool = True) -> list[str]:
    """List the damage of a checkpoint: files that are missing, changed or truncated, and files that no manifest names.

    No code of the checkpoint runs.

    Args:
        path: folder or URL of the checkpoint.
        digests: read every file and compare its digest. False: compare sizes only.

    Returns:
        One sentence for each problem; empty for an intact checkpoint.

    Raises:
        CheckpointNotFound: no checkpoint is there.
        CheckpointCorrupt: the manifest cannot be read.

    Example:
        for problem in problems("out/checkpoint-100"):
            print(problem)
    """
    folder = folder_at(path)
    manifest = manifest_at(folder)
    damage = []
    for entry in manifest.files:
        try:
            check_file(folder, entry, digest=digests)
        except CheckpointError as error:
            damage.append(str(error))
    for key, component in manifest.components.items():
        if not manifest.files_of(key):
            damage.append(f"{key}: the manifest names it ({component.sharing_pattern}), but no file of it")
    named = {file.path for file in manifest.files} | {MANIFEST}
    if manifest.format_version >= 2:
        damage += [f"{folder.path}/{name}: no manifest names it" for name in folder.walk() if name not in named]
    return damage


def differences(
    first: str | os.PathLike[str], second: str | os.PathLike[str], *, allow_pickle: bool = False
) -> Iterator[Difference]:
    """Compare the states of two checkpoints, leaf by leaf.

    Args:
        first: folder or URL of a checkpoint.
        second: folder or URL of another one.
        allow_pickle: load objects of any class, which can run code.

    Yields:
        Each difference. For tensors it tells how many elements differ, and by how much at most.

    Example:
        for difference in differences("out/checkpoint-100", "out/checkpoint-200"):
            print(difference.component, difference.path, difference.what)
    """
    one, other = states_in(first, allow_pickle=allow_pickle), states_in(second, allow_pickle=allow_pickle)
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other:
            yield Difference(component=name, path="", what=_only_in(name in one))
            continue
        left, right = dict(leaves_of(one[name]())), dict(leaves_of(other[name]()))
        for path in dict.fromkeys((*left, *right)):
            if path not in left or path not in right:
                yield Difference(component=name, path=path, what=_only_in(path in left))
            elif digest_of(left[path]) != digest_of(right[path]):
                yield Difference(component=name, path=path, what=_how(left[path], right[path]))


def states_in(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> dict[str, Any]:
    """Return a function that reads the state, by component: `key`, or `key[index]` if it has several states."""
    folder = folder_at(path)
    manifest = manifest_at(folder)
    readers: dict[str, Any] = {}
    for key in dict.fromkeys(file.component for file in manifest.files):
        files = manifest.files_of(key)
        if files[0].format == "dcp":
            written = folder.child(files[0].path.rpartition("/")[0])
            readers[key] = lambda written=written: read_whole(written, allow_pickle=allow_pickle)
            continue
        states = [file for file in files if file.format != "shard"]
        for entry in states:
            name = key if len(states) == 1 else f"{key}[{entry.index}]"
            readers[name] = lambda entry=entry, files=files: read_state(
                folder, entry, beside=files, allow_pickle=allow_pickle
            )
    return readers


def describe(manifest: Manifest) -> list[tuple[str, str, str, str, int]]:
    """Return rows of a table: component, pattern, ranks that wrote it, format, bytes."""
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
