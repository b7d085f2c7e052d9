"""Volumes as users write them: folders that calls find on the nodes, and that outlive the pool."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..core.frozenmap import FrozenMap
from ..core.signatures import checked_options
from ..errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@checked_options
@dataclass(frozen=True)
class Volume:
    """Folder on each node's disk that outlives the pool: `ComputePool(volumes={"/data": sky.Volume("cache")})`.

    In a task, `sky.volume("/data")` is the folder. Every pool of this user that names the volume finds its files again
    on the same machine: on this one and on SSH hosts until `skyward volume remove`, on a rented machine until it ends.
    Nodes on different machines have folders of their own. Only the login's user can read them (mode 0700).

    Args:
        source: Name of the volume: 1 to 100 letters, digits, "-", "_" and ".", a letter or digit first.

    Raises:
        UsageError: The name is not legal.

    Example:
        >>> Volume("cache")
        Volume(source='cache')
    """

    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not _NAME.fullmatch(self.source):
            raise _refusal(
                "Volume.source",
                self.source,
                "not the name of a volume; use 1 to 100 letters, digits, '-', '_' and '.', a letter or digit first",
            )


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


def _refusal(field: str, value: object, problem: str) -> UsageError:
    return UsageError(f"{field}={value!r}: {problem}", field=field, value=value)
