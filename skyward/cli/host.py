"""What this machine lets a program use: cores, memory, and the kernel's means that skyward builds on."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostFacts", "Support", "examine_host"]

# Source: Linux, Documentation/admin-guide/cgroup-v2.rst; the file says "max" where nothing is limited.
CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class Support:
    """One means of the operating system: whether it works here, and what skyward does without it."""

    name: str
    available: bool
    otherwise: str


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """This machine as a program here sees it; sizes in bytes, None where the system does not tell."""

    python: str
    executable: str
    platform: str
    cores: int
    usable_cores: int
    memory_bytes: int | None
    memory_available_bytes: int | None
    memory_limit_bytes: int | None
    open_files_soft: str
    open_files_hard: str
    supports: tuple[Support, ...]
    problems: tuple[str, ...]


def examine_host() -> HostFacts:
    """Look at this machine; tries the means of the kernel instead of trusting version numbers (sandboxes differ)."""
    total, available = memory()
    soft, hard = open_files()
    return HostFacts(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        executable=sys.executable,
        platform=f"{platform.platform()} ({platform.machine()})",
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=total,
        memory_available_bytes=available,
        memory_limit_bytes=memory_limit(total),
        open_files_soft=soft,
        open_files_hard=hard,
        supports=(
            Support(name="memfd", available=works(try_memfd), otherwise="large values lie in a scratch folder instead"),
            Support(name="pidfd", available=works(try_pidfd), otherwise="the death of a process is noticed by polling"),
        ),
        problems=() if hasattr(os, "fork") else ("this system cannot fork; on Windows, use WSL 2",),
    )


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its container where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such control group
        quota, period = CGROUP_CPU_LIMIT.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return cores


def memory() -> tuple[int | None, int | None]:
    """Total and available memory in bytes."""
    with suppress(OSError, KeyError, ValueError, IndexError):  # not Linux
        lines = MEMINFO.read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    with suppress(AttributeError, OSError, ValueError):  # not told here
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    return None, None


def memory_limit(total: int | None) -> int | None:
    """The limit of this process's container in bytes, where it is below what the machine has."""
    with suppress(OSError, ValueError):  # no such control group
        limit = int(CGROUP_MEMORY_LIMIT.read_text())
        return limit if total is None or limit < total else None
    return None


def open_files() -> tuple[str, str]:
    """Soft and hard limit of open files, in words."""
    try:
        import resource
    except ImportError:  # Windows
        return "not known", "not known"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit_in_words(soft), limit_in_words(hard)


def limit_in_words(limit: int) -> str:
    import resource

    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def works(attempt: Callable[[], int]) -> bool:
    """Whether the call gives a descriptor (closed again). Absent from Python, or refused by the kernel: False."""
    try:
        os.close(attempt())
    except (AttributeError, OSError):  # that is the answer
        return False
    return True


def try_memfd() -> int:
    return os.memfd_create("skyward-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def try_pidfd() -> int:
    return os.pidfd_open(os.getpid())
