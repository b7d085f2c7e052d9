"""Limits of a control group, as the text of the kernel's files. Nothing here touches a file.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

PERIOD_US = 100_000
"""Time in which a group may use its share of the processors, in microseconds: the kernel's own default."""
_LEAST_US = 1000
"""Least share that the kernel accepts, in microseconds."""
_CONTROLLERS = {"cpu": "cpus", "memory": "memory_gib"}


class Setting(NamedTuple):
    """Text to write into a file of a group. An optional file is missing where the kernel has no swap, for example."""

    file: str
    text: str
    is_optional: bool = False


def settings(
    version: Literal[1, 2], controllers: Collection[str], *, cpus: float | None, memory_gib: float | None
) -> Iterator[Setting]:
    """Yield what to write, in order, so that a group has these limits.

    Args:
        version: Version of the hierarchy.
        controllers: Controllers that the group has there.
        cpus: Processors; None for no limit.
        memory_gib: Memory; None for no limit.
    """
    if cpus is not None and "cpu" in controllers:
        quota_us = max(_LEAST_US, round(cpus * PERIOD_US))
        if version == 2:
            yield Setting("cpu.max", f"{quota_us} {PERIOD_US}")
        else:
            yield Setting("cpu.cfs_period_us", str(PERIOD_US))
            yield Setting("cpu.cfs_quota_us", str(quota_us))
    if memory_gib is not None and "memory" in controllers:
        size = str(int(memory_gib * 2**30))
        if version == 2:
            yield Setting("memory.max", size)
            yield Setting("memory.swap.max", "0", is_optional=True)
            # All processes of a call end together. Otherwise it would wait for the one that the kernel has killed.
            yield Setting("memory.oom.group", "1", is_optional=True)
        else:
            yield Setting("memory.limit_in_bytes", size)
            yield Setting("memory.memsw.limit_in_bytes", size, is_optional=True)


def room(version: Literal[1, 2], controllers: Collection[str], *, memory_gib: float, stat: str) -> Iterator[Setting]:
    """Yield what to write so that a group has its memory beside that of values which have left the process.

    A value travels in shared memory. The kernel counts it for the group that wrote it as long as anybody has it, such
    as the client.

    Args:
        version: Version of the hierarchy.
        controllers: Controllers that the group has there.
        memory_gib: Memory of the calls.
        stat: Text of the group's `memory.stat`.
    """
    shared = count_in(stat, "shmem")
    limits = list(settings(version, controllers, cpus=None, memory_gib=memory_gib + shared / 2**30))
    yield from limits
    if version == 1:  # memory may not exceed memory with swap, so either may have to come first
        yield limits[0]


def count_in(text: str, name: str) -> int:
    """Return a number in the text of a file that has a name and a number in each line; 0 without such a line."""
    fields = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    return int(fields.get(name, 0))


def kills_file(version: Literal[1, 2]) -> str:
    """Return the file that counts the processes which the kernel has killed at the memory limit."""
    return "memory.events" if version == 2 else "memory.oom_control"


def kills(text: str) -> int:
    """Return the count in the text of that file; 0 for kernels that do not count."""
    return count_in(text, "oom_kill")


def enforced(controllers: Collection[str]) -> tuple[str, ...]:
    """Return the options of calls that these controllers enforce."""
    return tuple(option for controller, option in _CONTROLLERS.items() if controller in controllers)


WANTED = tuple(_CONTROLLERS)
"""Controllers that enforce limits of calls."""
