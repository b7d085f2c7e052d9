"""Control groups of a process, as Linux lists them in /proc: one in each hierarchy of version 1, one in version 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from .records import dataclass

UNIFIED = "cgroup2"


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """Control group of a process in one hierarchy.

    Args:
        version: Version of the hierarchy.
        folder: Folder of the group.
        top: Mount point of the hierarchy.
        controllers: Controllers of the hierarchy in version 1; in version 2 each group has a file that lists them.
    """

    version: Literal[1, 2]
    folder: str
    top: str
    controllers: frozenset[str] = frozenset()

    def upwards(self) -> Iterator[str]:
        """Yield the folders of the group and its ancestors, as far as they can be seen here."""
        folder = self.folder
        yield folder
        while folder != self.top and len(folder) > len(self.top):
            folder = os.path.dirname(folder)
            yield folder


def groups_of(proc: str = "/proc/self") -> list[ControlGroup]:
    """Return the control groups of a process; none where the system has none. `proc` is the process's folder."""
    try:
        with open(os.path.join(proc, "cgroup")) as file:
            groups = file.read()
        with open(os.path.join(proc, "mountinfo")) as file:
            mounts = file.read()
    except OSError:  # macOS
        return []
    return list(_groups(groups, mounts))


def _groups(groups: str, mounts: str) -> Iterator[ControlGroup]:
    """Find the folders of groups. The arguments are the texts of `cgroup` and `mountinfo`; see proc(5)."""
    lines = [line.split(":", 2) for line in groups.splitlines()]
    paths = {frozenset([UNIFIED] if number == "0" else kinds.split(",")): path for number, kinds, path in lines}
    for mount in map(str.split, mounts.splitlines()):
        # number parent device root place options ... - type source superoptions
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        if kind not in ("cgroup", UNIFIED):
            continue
        wanted = {UNIFIED} if kind == UNIFIED else set(options)
        found = next(((kinds, path) for kinds, path in paths.items() if kinds <= wanted), None)
        if found is None:
            continue
        kinds, path = found
        root, place = mount[3], mount[4]
        # In a container the mount may start at the process's own group, but the path still starts at the host's.
        below = os.path.relpath(path, root) if path.startswith(root) else "."
        yield ControlGroup(
            version=2 if kind == UNIFIED else 1,
            folder=os.path.normpath(os.path.join(place, below)),
            top=place,
            controllers=frozenset() if kind == UNIFIED else kinds,
        )
