"""Facts about processes: their descendants, their memory, and whether they are gone.

This works on Linux only (/proc, prctl). The benchmark makes itself the reaper of its descendants, so a daemon that
detached itself from its parent is still found, weighed, and ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # Source: linux/prctl.h
_CPU_CLOCK = 2  # Kind of a process's clock, in the clock's number. Source: clock_getcpuclockid of glibc


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int) -> list[int]:
    """Return the ids of all running processes below `root`, parents before children. Zombies are left out."""
    children = _children()
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children[waiting.pop()]
        waiting.extend(pid for pid, _ in below)
        found.extend(pid for pid, state in below if state != "Z")
    return found


def _children() -> dict[int, list[tuple[int, str]]]:
    children: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended in the meantime
            # The command name is in parentheses and may hold spaces: split after the last one.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            children[int(parent)].append((int(entry.name), state))
    return children


def pss_mib(pids: list[int]) -> float:
    """Return the proportional memory of these processes: a page shared by n of them counts once, not n times."""
    return sum(_pss_kib(pid, "Pss:") for pid in pids) / 1024


def anonymous_mib(pid: int) -> float:
    """Return the memory of a process that belongs to no file, in MiB."""
    return _pss_kib(pid, "Pss_Anon:") / 1024


def _pss_kib(pid: int, entry: str) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0  # it ended in the meantime
    return next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith(entry)), 0)


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor seconds of these processes' living threads so far. Ended threads do not count."""
    total_ns = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it ended in the meantime
                total_ns += int(thread.read_text().split()[0])
    return total_ns / 1e9


def all_cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far, with those of threads that have ended; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    return 0.0


def command_line(pid: int) -> str:
    """Return the command of a process, for a person to read."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return " ".join(word.decode(errors="replace") for word in words if word)[:120]


def sweep(*, grace_s: float) -> list[str]:
    """Wait until this process has no descendants, kill the ones that are left, and return the commands killed."""
    deadline = time.monotonic() + grace_s
    while descendants(os.getpid()) and time.monotonic() < deadline:
        _reap()
        time.sleep(0.05)
    killed: list[str] = []
    while left := descendants(os.getpid()):
        killed.extend(command_line(pid) for pid in left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        _reap()
    _reap()
    return killed


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def available_memory_bytes() -> int:
    """Return the memory that is available without swapping, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def warm_memory(size_bytes: int) -> None:
    """Touch that much memory and give it back, so that the next measurement is not the first to touch it.

    A virtual machine takes memory from its host at the first touch, and may give back memory that was free for some
    seconds. Copying 100 MB then took 205 ms instead of 10. Call this right before a timed block.
    """
    with mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, len(memory), mmap.PAGESIZE):
            memory[offset] = 1
