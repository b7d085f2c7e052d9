"""Facts about this machine: usable cores, memory, and the kernel features that skyward uses."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Source: Linux, Documentation/admin-guide/cgroup-v2.rst. The file holds "max" where there is no limit.
CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class Support:
    """Kernel feature: whether it works here, and the fallback without it."""

    name: str
    available: bool
    otherwise: str


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts about this machine as this process sees it. Sizes are in bytes; None means unknown."""

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
    """Describe this machine. Kernel features are tried out, because sandboxes disable some that the version has."""
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
            Support(name="memfd", available=works(try_memfd), otherwise="large values go to files in a scratch folder"),
            Support(name="pidfd", available=works(try_pidfd), otherwise="skyward polls for processes that end"),
        ),
        problems=() if hasattr(os, "fork") else ("this system cannot fork; on Windows, use WSL 2",),
    )


def usable_cores() -> int:
    """Count the cores that this process may use, by its affinity and its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such control group
        quota, period = CGROUP_CPU_LIMIT.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" raises ValueError: there is no quota
    return cores


def memory() -> tuple[int | None, int | None]:
    """Read total and available memory, in bytes. None where the system does not report it."""
    with suppress(OSError, KeyError, ValueError, IndexError):  # not Linux
        lines = MEMINFO.read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    with suppress(AttributeError, OSError, ValueError):  # this system does not report it
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    return None, None


def memory_limit(total: int | None) -> int | None:
    """Read the memory limit of this process's container, in bytes. None where it is not below `total`."""
    with suppress(OSError, ValueError):  # no such control group
        limit = int(CGROUP_MEMORY_LIMIT.read_text())
        return limit if total is None or limit < total else None
    return None


def open_files() -> tuple[str, str]:
    """Read the soft and the hard limit of open files, as text."""
    try:
        import resource
    except ImportError:  # Windows
        return "unknown", "unknown"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit_in_words(soft), limit_in_words(hard)


def limit_in_words(limit: int) -> str:
    import resource

    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def works(attempt: Callable[[], int]) -> bool:
    """Return whether the call opens a descriptor, and close it. False if Python lacks it or the kernel refuses it."""
    try:
        os.close(attempt())
    except (AttributeError, OSError):  # not available here
        return False
    return True


def try_memfd() -> int:
    return os.memfd_create("skyward-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def try_pidfd() -> int:
    return os.pidfd_open(os.getpid())
