"""Processes as the system knows them: their names for good, ties between parent and child, where they import us."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

__all__ = ["PACKAGE_ROOT", "adopt_orphans", "die_with_parent", "start_time"]

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder on `sys.path` that holds this package: a new process must find the same one."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h."""


def start_time(pid: int) -> str:
    """Return when the process began, in whatever unit the system has; "" where there is none, or a zombie.

    Numbers are given again: number and start together name a process for good.
    """
    if not os.path.isdir("/proc/self"):
        argv = ["ps", "-o", "lstart=", "-p", str(pid)]
        return "-".join(subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split())
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # pid (command, which may hold anything) state ppid ...; the start is in ticks since boot.
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # no such process
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies (Linux; elsewhere nothing)."""
    _prctl(_PR_SET_PDEATHSIG, by)


def adopt_orphans() -> None:
    """Make descendants whose parent has died children of this process, whatever their session (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
