"""Volumes of a pool, as its tasks see them."""

from __future__ import annotations

import os
from pathlib import Path

from ...core.signatures import checked_options
from ...core.spellings import suggestion
from ...errors import UsageError
from .runtime import instance_info


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

    def __init__(self, path: str) -> None:
        self.path = Path(path)

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
    return VolumeFolder(info.volumes[path])
