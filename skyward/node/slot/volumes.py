"""Volumes of a pool, as its tasks see them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.signatures import checked_options
from ...core.spellings import suggestion
from ...errors import MissingDependency, UsageError, VolumeFailed
from ...state.mounts import is_dead, is_mounted, mount
from ...state.volumes import is_for_mount
from ...values.volume import PlacedVolume
from .runtime import instance_info
from .volume_index import VolumeCopy

_BOOT = """
import sys
sys.path[:] = sys.argv[1:]
from skyward.node.slot.volume_sync import main
sys.exit(main())
"""

_placed: dict[str, PlacedVolume] = {}
"""Volumes of this process's pool, by their paths."""


class VolumeFolder(os.PathLike[str]):
    """Folder of a volume on the node of the running task, as `sky.volume` returns it.

    It can be used wherever a path can, and `folder / "name"` is the path of a file in it.

    Attributes:
        path: Folder on the node.

    Example:
        @sky.compute
        def first(name: str) -> str:
            folder = sky.volume("/data")
            return (folder / name).read_text()
    """

    def __init__(self, place: PlacedVolume) -> None:
        self._place = place
        self.path = Path(place.folder)

    def commit(self, *, overwrite: bool = False) -> None:
        """Save written and deleted files of a writable volume to its store now, without waiting for the call's end.

        This does nothing for named volumes and NFS, where every write is at its place already.

        Args:
            overwrite: Whether files that others have changed in the store meanwhile are overwritten.

        Raises:
            UsageError: The volume is read-only.
            VolumeFailed: The store does not take the files, or others have changed some of them (`error.files`).
        """
        volume = self._place.volume
        if (volume.is_store or volume.is_nfs) and volume.read_only is not False:
            raise UsageError(
                f"volume={self._place.path!r}: is read-only; write sky.Volume({volume.source!r}, read_only=False)"
            )
        if volume.is_store:
            _save(self._place, overwrites=overwrite)

    def refresh(self) -> None:
        """Fetch what has changed in the store since the node's first call. Does nothing for a named or mounted volume.

        Files that this node has changed stay as they are.

        Raises:
            VolumeFailed: The store does not answer, or a file has changed both here and there.
        """
        if self._place.volume.is_store and not is_mounted(self._place.folder):
            copy = _copy_of(self._place)
            with copy.alone():
                _fetch(self._place, copy)

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"VolumeFolder({str(self.path)!r})"


@checked_options
def volume(path: str) -> VolumeFolder:
    """Return the folder of a volume on the node where this task runs.

    Any thread of a task may call it.

    Args:
        path: Path under which the pool names the volume.

    Raises:
        UsageError: The pool has no such volume, or this code does not run in a task.

    Example:
        @sky.compute
        def count() -> int:
            return len(os.listdir(sky.volume("/data")))

        with sky.ComputePool(sky.Local(), volumes={"/data": sky.Volume("cache")}) as pool:
            count() >> pool
    """
    info = instance_info()
    if info is None:
        raise UsageError(
            f"volume={path!r}: volumes are on the nodes of a pool, and this code runs in no task; send the call "
            "with `>> pool`",
            field="path",
            value=path,
        )
    if path not in info.volumes:
        near = suggestion(str(path), info.volumes) if info.volumes else None
        known = ", ".join(map(repr, info.volumes))
        advice = f"did you mean {near!r}?" if near else f"use {known}" if known else "set ComputePool(volumes={...})"
        raise UsageError(f"volume={path!r}: no such volume in this pool; {advice}", field="path", value=path)
    place = _placed[path]
    if is_dead(place.folder):
        with _copy_of(place).alone():
            if is_dead(place.folder):  # no other process has mounted it again meanwhile
                mount(place.volume, place.folder)
    return VolumeFolder(place)


# Before and after calls -----------------------------------------------------------------------------------------------


def fetch_volumes(places: Sequence[PlacedVolume], agent: str) -> None:
    """Mount or fetch the stores of a pool, unless another process of the node has. Called once in each process.

    Args:
        places: Volumes of the pool.
        agent: Path of the agent's socket. Its folder is that of the node.

    Raises:
        VolumeFailed: A store cannot be mounted or fetched.
        MissingDependency: The node has no client for it.
    """
    _placed.update((place.path, place) for place in places)
    for place in places:
        if place.volume.is_store or place.volume.is_nfs:
            copy = _copy_of(place)
            mark = os.path.join(os.path.dirname(agent), f"fetched-{os.path.basename(copy.home)}")
            with copy.alone():
                if is_dead(place.folder) or not os.path.exists(mark):
                    if not is_for_mount(place) or not _mount(place):
                        _fetch(place, copy)
                    with open(mark, "w"):
                        pass


def save_volumes(places: Sequence[PlacedVolume]) -> None:
    """Save what a call has changed in writable volumes. Raises VolumeFailed."""
    for place in places:
        if place.volume.is_store and place.volume.read_only is False:
            _save(place, overwrites=False)


def _mount(place: PlacedVolume) -> bool:
    """Mount a volume. Return False if it must be copied instead. Raises VolumeFailed if copies are no substitute."""
    try:
        mount(place.volume, place.folder)
    except VolumeFailed as error:
        if place.volume.mount or place.volume.is_nfs:
            problem = f"volumes[{place.path!r}]: {error}"
            raise VolumeFailed(problem, path=place.path, retryable=False) from None  # words: ok, from state/mounts.py
        sys.stderr.write(f"skyward: volumes[{place.path!r}] is copied, because it was not mounted: {error}\n")
        return False
    return True


def _copy_of(place: PlacedVolume) -> VolumeCopy:
    return VolumeCopy(os.path.dirname(place.folder))


def _save(place: PlacedVolume, *, overwrites: bool) -> None:
    copy = _copy_of(place)
    if any(copy.changes()):  # nothing is started for calls that only read
        with copy.alone():
            if any(copy.changes()):
                _order(place, {"action": "save", "overwrites": overwrites})


def _fetch(place: PlacedVolume, copy: VolumeCopy) -> None:
    volume = place.volume
    is_writable = volume.read_only is False
    _order(place, {"action": "fetch", "is_writable": is_writable, "limit_bytes": volume.limit_bytes})


def _order(place: PlacedVolume, order: Mapping[str, Any]) -> None:
    """Run `volume_sync` in a process of its own. An exception in this thread, such as a cancel, kills it."""
    whole = {**order, "source": place.volume.source, "home": _copy_of(place).home}
    done = subprocess.run(
        [sys.executable, "-c", _BOOT, *sys.path], input=json.dumps(whole).encode(), capture_output=True, check=False
    )
    subject = f"volumes[{place.path!r}]:"
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise VolumeFailed(
            f"{subject} the process that copies its files exited with code {done.returncode} ({last!r}); free memory "
            "and disk space on the node, then retry",
            path=place.path,
        ) from None
    if "missing" in answer:
        raise MissingDependency(" ".join((subject, answer["error"])), name=answer["missing"])
    if "error" in answer:
        raise VolumeFailed(
            " ".join((subject, answer["error"])),
            path=place.path,
            files=tuple(answer.get("files", ())),
            retryable=answer.get("retryable", False),
        )
