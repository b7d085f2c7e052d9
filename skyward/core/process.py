"""Processes as the system knows them: permanent names, ties between parent and child, and the import path."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
from typing import Any

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Folder on `sys.path` that holds this package. New processes must import the same one."""
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h."""
USUAL_SLACK_S = 50e-6
"""Source: prctl(2)."""


def collect_rarely() -> None:
    """Look for garbage less often in this process, which is ours alone.

    Imports make many objects that stay. To look through them over and over takes a twentieth of the start of a hub. Our
    own code creates hardly any cycles.
    """
    gc.set_threshold(50_000, 10, 10)


def start_time(pid: int) -> str:
    """Return the start of a process, in whatever unit the system uses; "" if it does not exist or is a zombie.

    Process numbers are reused. Number and start together identify a process for good.
    """
    if not os.path.isdir("/proc/self"):
        import subprocess  # only here: every process of a node imports this module

        argv = ["ps", "-o", "lstart=", "-p", str(pid)]
        return "-".join(subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split())
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # Format: pid (command) state ppid ... A command may contain ")". The start is in ticks since boot.
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # no such process
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def process_table() -> list[tuple[int, int, int]]:
    """Read (pid, parent, session) of every process in /proc."""
    stats = []
    with contextlib.suppress(OSError):  # not Linux
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:  # exited meanwhile
                # Format: pid (command, which may contain anything) state ppid pgrp session ...
                fields = file.read().rpartition(b")")[2].split()
                stats.append((int(name), int(fields[1]), int(fields[3])))
    return stats


def processes_below(pid: int) -> list[int]:
    """List the descendants of a process, nearest first."""
    children: dict[int, list[int]] = {}
    for child, parent, _ in process_table():
        children.setdefault(parent, []).append(child)
    descendants = list(children.get(pid, []))
    for below in descendants:  # the list grows during the walk
        descendants.extend(children.get(below, []))
    return descendants


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies (Linux; no effect elsewhere)."""
    _prctl(_PR_SET_PDEATHSIG, by)


def adopt_orphans() -> None:
    """Make this process the new parent of orphaned descendants, whatever their session (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_timer_slack(slack_s: float) -> None:
    """Let waits of this thread, and of all that it starts, end up to `slack_s` late (Linux; no effect elsewhere).

    Waits that may be late end together, and fewer of them wake a processor that sleeps. The system's own slack is
    `USUAL_SLACK_S`.
    """
    _prctl(_PR_SET_TIMERSLACK, int(slack_s * 1e9))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # only here: the client imports this module too

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def is_readable(file: Any, timeout_s: float) -> bool:
    """Wait for input, or for its end, at most this long. Unlike `select`, it takes descriptors above 1,023."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
