"""Volumes as users write them: folders that calls find on the nodes, and that outlive the pool."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple

from ..core.bounds import is_positive
from ..core.frozenmap import FrozenMap
from ..core.records import dataclass
from ..core.signatures import checked_options
from ..errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#\s]+)(/[^?#\s]*)?")
_CACHE_GIB = 20.0
_NOT_STORES = {
    "file": ("a folder of a disk is no store", "name a volume, such as sky.Volume('cache')"),
    "local": ("a folder of a disk is no store", "name a volume, such as sky.Volume('cache')"),
    "memory": ("each process has its own memory, so nodes would find nothing", "use a store such as s3://bucket/data"),
}


@checked_options
@dataclass(frozen=True)
class Volume:
    """Folder on the nodes that outlives the pool: `ComputePool(volumes={"/data": sky.Volume("cache")})`.

    In a task, `sky.volume("/data")` is the folder.

    A **name** stands for a folder on each node's disk. Every pool of this user that names the volume finds its files
    again on the same machine: on this one and on SSH hosts until `skyward volume remove`, on a rented machine until it
    ends. Nodes on different machines have folders of their own.

    A **URL** stands for files in an object store, such as `s3://bucket/data`. They are mounted before a node's first
    call if the node has a FUSE client for that store, and are copied to a cache on its disk if it has none. A writable
    volume has a copy for each node, and is saved to the store whenever a call returns. Copies need the store's fsspec
    client, such as `Image(pip=["s3fs"])`. Both need its credentials, as in
    `Image(env={"AWS_SECRET_ACCESS_KEY": sky.Secret("AWS_SECRET_ACCESS_KEY")})`. The URL `nfs://server/export` is an
    export that the nodes mount, which only root may do there.

    Only the login's user can read the folders (mode 0700).

    Args:
        source: Name (1 to 100 letters, digits, "-", "_" and ".", a letter or digit first), or URL without credentials.
        read_only: Whether changes stay out of the store. None: True for a URL.
        cache_gib: Most GiB that cached files of object stores take on a node's disk, > 0. None: 20.
        mount: Whether a read-only object store is mounted. None: True where the node has a FUSE client.

    Raises:
        UsageError: An option is illegal; the message names it.

    Example:
        >>> Volume("cache")
        Volume('cache')
        >>> Volume("s3://bucket/data", read_only=False)
        Volume('s3://bucket/data', read_only=False)
    """

    source: str
    read_only: bool | None = field(default=None, kw_only=True)
    cache_gib: float | None = field(default=None, kw_only=True)
    mount: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        source = self.source
        if isinstance(source, str) and "://" in source:
            self._check_url()
            return
        if not isinstance(source, str) or not _NAME.fullmatch(source):
            raise _refusal(
                "Volume.source",
                source,
                "not the name of a volume; use 1 to 100 letters, digits, '-', '_' and '.', a letter or digit first, "
                "or a URL such as 's3://bucket/data'",
            )
        for option in ("read_only", "cache_gib", "mount"):
            if getattr(self, option) is not None:
                raise _refusal(
                    f"Volume.{option}", getattr(self, option), "is for object stores; leave it out for a named volume"
                )

    def _check_url(self) -> None:
        match = _URL.fullmatch(self.source)
        if "@" in self.source.partition("://")[2].partition("/")[0]:
            raise UsageError(
                "Volume.source: the URL has credentials; take them out, and pass them to the nodes with "
                "Image(env={NAME: sky.Secret(NAME)})",
                field="Volume.source",
            )
        if match is None:
            raise _refusal("Volume.source", self.source, "not a URL of a store; write one such as 's3://bucket/data'")
        if match[1] in _NOT_STORES:
            problem, advice = _NOT_STORES[match[1]]
            raise _refusal("Volume.source", self.source, f"{problem}; {advice}")
        for option in ("read_only", "mount"):
            if not isinstance(getattr(self, option), bool | None):
                raise _refusal(f"Volume.{option}", getattr(self, option), "not supported; use True, False or None")
        if self.mount and self.read_only is False and not self.is_nfs:
            raise _refusal("Volume.mount", True, "is for read-only stores; leave out mount=True or read_only=False")
        if self.is_nfs and (self.mount is False or self.cache_gib is not None):
            option = "cache_gib" if self.cache_gib is not None else "mount"
            raise _refusal(f"Volume.{option}", getattr(self, option), "NFS is always mounted; leave it out")
        if self.cache_gib is not None and not is_positive(self.cache_gib):
            raise _refusal("Volume.cache_gib", self.cache_gib, "must be a number of GiB > 0; set cache_gib=20")

    @property
    def is_store(self) -> bool:
        """Return whether its files are in an object store."""
        return "://" in self.source and not self.is_nfs

    @property
    def is_nfs(self) -> bool:
        """Return whether it is an export of an NFS server."""
        return self.source.startswith("nfs://")

    @property
    def limit_bytes(self) -> int:
        """Most bytes of cached files."""
        return int((self.cache_gib or _CACHE_GIB) * 2**30)

    def __repr__(self) -> str:
        options = {"read_only": self.read_only, "cache_gib": self.cache_gib, "mount": self.mount}
        shown = (f", {name}={value!r}" for name, value in options.items() if value is not None)
        return f"Volume({self.source!r}{''.join(shown)})"


class PlacedVolume(NamedTuple):
    """Volume on a node: the path that the user wrote, and the folder with its files.

    The parent of a store's folder has the index of its copy, and is nobody else's business.
    """

    path: str
    folder: str
    volume: Volume


def check_volumes(volumes: Mapping[str, Volume | str]) -> FrozenMap[Volume]:
    """Return the volumes of a pool by their paths, as it was written. Raises UsageError, which names the path."""
    if not isinstance(volumes, Mapping):
        raise _refusal("volumes", volumes, 'not a dict; pass paths with volumes: {"/data": sky.Volume("cache")}')
    checked: dict[str, Volume] = {}
    for path, volume in volumes.items():
        _check_path(path)
        for other in checked:
            if _is_within(path, other) or _is_within(other, path):
                raise UsageError(
                    f"volumes[{path!r}]: overlaps volumes[{other!r}]; place them side by side", field="volumes"
                )
        if not isinstance(volume, str | Volume):
            raise _refusal(f"volumes[{path!r}]", volume, 'not a volume; pass sky.Volume("cache")')
        checked[path] = Volume(volume) if isinstance(volume, str) else volume
    return FrozenMap(checked)


def _check_path(path: object) -> None:
    legal = "use a path such as '/data', '~/data' or 'data'"
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise _refusal("volumes", path, f"not a path; {legal}")
    if ".." in path.split("/") or os.path.normpath(path) in ("/", ".", "//") or path in ("~", "~/"):
        raise _refusal("volumes", path, f"not a folder of its own; {legal}")


def _is_within(path: str, other: str) -> bool:
    return f"{os.path.normpath(path)}/".startswith(f"{os.path.normpath(other)}/")


def _refusal(option: str, value: object, problem: str) -> UsageError:
    return UsageError(f"{option}={value!r}: {problem}", field=option, value=value)
