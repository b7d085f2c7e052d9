"""How much of the machine this process may use: memory and open files.

In a container the machine has more memory than its control group allows, and whoever counts on the machine's is killed.
So the smallest of all limits counts: the machine's memory, those of the control group and the groups above it, and the
process's own (`ulimit`).
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

__all__ = ["file_limit", "memory_bytes", "raise_file_limit"]

_MANY_FILES = 1 << 20
"""Where there is no limit."""


def memory_bytes(proc: str = "/proc/self") -> int:
    """Bytes of memory that this process may use at most. `proc`: where its control groups and mounts are listed."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits(proc)]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def _group_limits(proc: str) -> Iterator[int]:
    """Of the process's memory control group and all above it; version 1 or 2, whichever is mounted."""
    for folder, top, name in _memory_groups(proc):
        while True:
            # No such file, or "max".
            with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name)) as file:
                yield int(file.read())
            if folder == top or len(folder) <= len(top):
                break
            folder = os.path.dirname(folder)  # noqa: PLW2901  # the way up


def _memory_groups(proc: str) -> Iterator[tuple[str, str, str]]:
    """(folder of the group, where its hierarchy is mounted, name of the file that holds the limit)"""
    try:
        with open(os.path.join(proc, "cgroup")) as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        with open(os.path.join(proc, "mountinfo")) as file:
            mounts = [line.split() for line in file]
    except OSError:  # macOS
        return
    paths = {"cgroup2" if number == "0" else kinds: path for number, kinds, path in groups}
    for mount in mounts:
        # number parent device root place options ... - type source superoptions
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        if kind == "cgroup2":
            path, name = paths.get("cgroup2"), "memory.max"
        elif kind == "cgroup" and "memory" in options:
            path = next((path for kinds, path in paths.items() if "memory" in kinds.split(",")), None)
            name = "memory.limit_in_bytes"
        else:
            continue
        root, place = mount[3], mount[4]
        if path is not None:
            # In a container the mount may begin at the process's own group, whose path is told from the machine's top.
            below = os.path.relpath(path, root) if path.startswith(root) else "."
            yield os.path.normpath(os.path.join(place, below)), place, name


def file_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as it may: each blob is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
