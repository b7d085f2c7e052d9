"""Limits of this process on its machine: memory and open files.

A container often allows less memory than the machine has, and the kernel kills a process that exceeds it. So the
smallest limit counts: the machine's memory, the control group and its ancestors, and the process's own `ulimit`.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

_MANY_FILES = 1 << 20
"""Stand-in for "unlimited"."""


def memory_bytes(proc: str = "/proc/self") -> int:
    """Return how many bytes of memory this process may use. `proc` is the folder with its `cgroup` and `mountinfo`."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits(proc)]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def default_blob_limit() -> int:
    """Return the most bytes of blobs in memory: a quarter of the memory that this process may use."""
    return memory_bytes() // 4


def _group_limits(proc: str) -> Iterator[int]:
    """Yield the limits of the process's memory control group and its ancestors, in version 1 or 2."""
    for folder, top, name in _memory_groups(proc):
        while True:
            # The file is missing, or holds "max" (no limit).
            with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name)) as file:
                yield int(file.read())
            if folder == top or len(folder) <= len(top):
                break
            folder = os.path.dirname(folder)  # noqa: PLW2901  # the way up


def _memory_groups(proc: str) -> Iterator[tuple[str, str, str]]:
    """Yield (folder of the group, mount point of its hierarchy, name of the limit file)."""
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
            # In a container the mount may start at the process's own group, but the path still starts at the host's.
            below = os.path.relpath(path, root) if path.startswith(root) else "."
            yield os.path.normpath(os.path.join(place, below)), place, name


def file_limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard limit, because each blob is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS reports a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
