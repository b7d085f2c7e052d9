"""Limits of this process on its machine: memory and open files.

A container often allows less memory than the machine has, and the kernel kills a process that exceeds it. So the
smallest limit counts: the machine's memory, the control group and its ancestors, and the process's own `ulimit`.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from .cgroups import groups_of

_MANY_FILES = 1 << 20
"""Stand-in for "unlimited"."""
_LEAST_BLOBS = 64 << 20
"""Least bytes of blobs in memory of one of many nodes on a machine."""


def memory_bytes(proc: str = "/proc/self") -> int:
    """Return how many bytes of memory this process may use. `proc` is the folder with its `cgroup` and `mountinfo`."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits(proc)]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def default_blob_limit(nodes: int = 1) -> int:
    """Return the most bytes of blobs in memory: a quarter of the memory that this process may use.

    Args:
        nodes: Nodes that share this machine, and so the limit; >= 1.

    Returns:
        Part of one of them; at least 64 MiB, or all if that is less, so that each of many nodes keeps some arguments.
    """
    limit = memory_bytes() // 4
    return max(limit // nodes, min(limit, _LEAST_BLOBS))


def _group_limits(proc: str) -> Iterator[int]:
    """Yield the limits of the process's memory control group and its ancestors, in version 1 or 2."""
    for group in groups_of(proc):
        if group.version == 1 and "memory" not in group.controllers:
            continue
        name = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
        for folder in group.upwards():
            # The file is missing, or holds "max" (no limit).
            with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name)) as file:
                yield int(file.read())


def file_limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard limit, because each blob is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS reports a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
