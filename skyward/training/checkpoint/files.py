"""Checkpoints as folders of files: what the Trainer writes to and reads from, and one plain implementation.

A checkpoint `output_dir/checkpoint-<step>` holds `<key>_state.pt` of what the ranks share, `<key>_state_rank_<r>.pt`
of what each has for itself, and `checkpoint_manifest.json`, which is written last. It is made in a staging folder
beside it, and renamed when every rank has written and flushed its files: a folder of that name is whole.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ...errors import UsageError
from ..agree import Failure, Ranks
from .patterns import SharingPattern, StateComponent

__all__ = ["Checkpoints", "FileCheckpoints"]

MANIFEST = "checkpoint_manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_STAGING, _REPLACED = ".tmp-", ".old-"


class Checkpoints(Protocol):
    """Where a run's states go. Methods that say so are collective: all ranks call them, in one order."""

    def save(self, step: int, components: Sequence[StateComponent]) -> str:
        """Keeps them as the checkpoint of `step`, in place of one that is there. Collective. Gives its path.

        Raises: on every rank, if one fails; then what was there before is still there.
        """

    def load(self, path: str, components: Sequence[StateComponent], *, only: Collection[str] | None = None) -> None:
        """Loads the states of a checkpoint into the components, or into those with the keys `only`. Collective."""

    def latest(self) -> str | None:
        """The path of the newest whole checkpoint by step; None where there is none."""

    def path_of(self, step: int) -> str | None:
        """That of `step`, if there is one."""

    def prune(self, *, keep: int, protect: Collection[str]) -> None:
        """Deletes the oldest until `keep` are left; those in `protect` and the newest stay. Collective."""


class FileCheckpoints:
    """Folders in `folder`, on a disk that all ranks share, or with `on_each_node` on one of each node."""

    def __init__(self, folder: str, *, ranks: Ranks, on_each_node: bool = False) -> None:
        self.folder = Path(folder)
        self._ranks = ranks
        self._on_each_node = on_each_node
        self._is_leader = ranks.rank == 0 or (on_each_node and ranks.local_rank == 0)

    def save(self, step: int, components: Sequence[StateComponent]) -> str:
        final = self.folder / f"checkpoint-{step}"
        staging = self.folder / f"{_STAGING}{final.name}-{self._ranks.share(uuid.uuid4().hex[:12])}"
        states = [(component, component.stateful.state_dict()) for component in components]

        def write() -> dict[str, int]:
            staging.mkdir(parents=True, exist_ok=True)
            return {
                name: _write(staging / name, state)
                for component, state in states
                if (name := self._written_by_me(component)) is not None
            }

        try:
            written = self._together(write, f"writing {final.name}")
            if self._is_leader:
                sizes = {name: size for each in written for name, size in each.items()}
                manifest = _manifest(final, components, sizes, self._ranks.world_size)
                self._together(lambda: self._commit(staging, final, manifest), f"committing {final.name}")
            else:
                self._together(lambda: None, f"committing {final.name}")
        except BaseException:
            if self._is_leader:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        return str(final)

    def load(self, path: str, components: Sequence[StateComponent], *, only: Collection[str] | None = None) -> None:
        folder = Path(path)
        if not (folder / MANIFEST).is_file():
            raise UsageError(f"resume_from_checkpoint={path!r}: no checkpoint is there ({MANIFEST} is missing)")
        written_by = int(json.loads((folder / MANIFEST).read_text())["world_size"])
        for component in components:
            if only is not None and component.key not in only:
                continue
            file = folder / self._name(component)
            if file.is_file():
                component.stateful.load_state_dict(_read(file))
            elif component.required:
                raise UsageError(
                    f"resume_from_checkpoint={path!r}: {file.name} is missing; it was written by {written_by} ranks, "
                    f"and this is rank {self._ranks.rank} of {self._ranks.world_size}"
                )

    def latest(self) -> str | None:
        found = self._all()
        return str(found[-1]) if found else None

    def path_of(self, step: int) -> str | None:
        path = self.folder / f"checkpoint-{step}"
        return str(path) if (path / MANIFEST).is_file() else None

    def prune(self, *, keep: int, protect: Collection[str]) -> None:
        if not self._is_leader:
            return
        found = self._all()
        safe = {Path(each) for each in protect} | set(found[-1:])
        for path in [each for each in found if each not in safe][: max(0, len(found) - keep)]:
            doomed = self.folder / f"{_STAGING}deleted-{uuid.uuid4().hex[:12]}"
            path.rename(doomed)  # so that nobody sees a half of it
            shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Clears what an interrupted save or deletion has left. Only while nothing else saves to the folder."""
        if not self._is_leader or not self.folder.is_dir():
            return
        for path in self.folder.glob(f"{_REPLACED}checkpoint-*"):
            final = self.folder / path.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:  # it was interrupted between the two renames
                path.rename(final)
        for path in self.folder.glob(f"{_STAGING}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[Path]:
        """Whole checkpoints, by their steps."""
        if not self.folder.is_dir():
            return []
        steps = {
            int(match[1]): path
            for path in self.folder.iterdir()
            if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
        }
        return [steps[step] for step in sorted(steps)]

    def _name(self, component: StateComponent) -> str:
        if component.sharing_pattern is SharingPattern.PER_RANK:
            return f"{component.key}_state_rank_{self._ranks.rank}.pt"
        return f"{component.key}_state.pt"

    def _written_by_me(self, component: StateComponent) -> str | None:
        is_mine = self._is_leader or component.sharing_pattern is SharingPattern.PER_RANK
        return self._name(component) if is_mine else None

    def _commit(self, staging: Path, final: Path, manifest: dict[str, Any]) -> None:
        with open(staging / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2)
            _flush(file.fileno())
        _flush_folder(staging)
        replaced = self.folder / f"{_REPLACED}{final.name}"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        staging.rename(final)
        _flush_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _together(self, act: Any, what: str) -> list[Any]:
        """What `act` gives on every rank. If it raises on one, that error is raised there, RankFailed elsewhere."""
        try:
            value = act()
        except Exception as error:
            self._ranks.fail(Failure.of(self._ranks.rank, error, what))
            raise
        return self._ranks.exchange(value)


def _write(path: Path, state: Any) -> int:
    """-> its size in bytes; it is on the disk then."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        _flush(file.fileno())
        return file.tell()


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path}: has objects of classes that are not loaded unasked, because loading them may run code. If you "
            f"trust the file, allow them by torch.serialization.add_safe_globals([...]). {error}"
        ) from error


def _manifest(
    final: Path, components: Sequence[StateComponent], sizes: dict[str, int], world_size: int
) -> dict[str, Any]:
    def part(component: StateComponent) -> dict[str, Any]:
        per_rank = component.sharing_pattern is SharingPattern.PER_RANK
        prefix = f"{component.key}_state_rank_" if per_rank else f"{component.key}_state.pt"
        return {
            "key": component.key,
            "sharing_pattern": component.sharing_pattern.value,
            "ranks": list(range(world_size)) if per_rank else [0],
            "size_bytes": sum(size for name, size in sizes.items() if name.startswith(prefix)),
        }

    return {
        "version": 1,
        "checkpoint_path": final.name,
        "world_size": world_size,
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "components": {component.key: part(component) for component in components},
    }


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)
