"""The parents of an agent: they end everything below them when the agent dies or the lease runs out.

The watchdog is the subreaper of the node's processes. Whatever user code starts, however it detaches, ends up as a
child of the watchdog and is killed. The watchdog does nothing else, so it does not fail with the agent.

The standby is the watchdog's parent, and a subreaper too. When the watchdog is killed, the standby gets its children
and kills them. When the standby is killed, the watchdog sees it and ends the node. A process that detached itself
escapes only if both are killed at the same moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable

from ...core.process import adopt_orphans, die_with_parent

__all__ = ["Lease", "guard", "kill_session", "processes_below", "processes_of_session"]

_POLL_S = 0.25
_PAUSE_S = 1.0
"""A watchdog that wakes so much too late was stopped: a paused machine, SIGSTOP, a frozen cgroup."""
_KILL_LIMIT_S = 5.0


class Lease:
    """When the keeper was last heard of, in memory that agent and watchdog share. Contact, not wall-clock."""

    def __init__(self, lease_s: float, file: str = "") -> None:
        self.lease_s = lease_s
        self._file = file
        self._page = mmap.mmap(-1, 4096)
        self.renew()

    def renew(self) -> None:
        struct.pack_into("<d", self._page, 0, time.monotonic())
        if self._file:
            with contextlib.suppress(OSError):  # then the machine ends as if there were no contact
                os.utime(self._file)

    @property
    def is_over(self) -> bool:
        (renewed,) = struct.unpack_from("<d", self._page, 0)
        return bool(time.monotonic() - renewed > self.lease_s)


def guard(run_agent: Callable[[], int], lease: Lease, folder: str) -> int:
    """Become the standby: fork the watchdog, which forks the agent. Clean up when they end.

    Returns the exit code for this process.
    """
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # a client that ignores it passes that on, and then none is waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent is told to end; then so are we
    adopt_orphans()
    standby = os.getpid()
    watchdog = _fork(lambda: _run_watchdog(run_agent, lease, folder, standby), dies_by=signal.SIGCHLD)
    code = os.waitstatus_to_exitcode(os.waitpid(watchdog, 0)[1])
    _kill_children()
    shutil.rmtree(folder, ignore_errors=True)
    return code


def _run_watchdog(run_agent: Callable[[], int], lease: Lease, folder: str, standby: int) -> int:
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGCHLD])
    agent = _fork(lambda: _run_agent(run_agent), dies_by=signal.SIGKILL)
    code = _watch(agent, lease, standby)
    _kill_children()
    shutil.rmtree(folder, ignore_errors=True)  # the standby may be dead
    return code


def _run_agent(run_agent: Callable[[], int]) -> int:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # what the client blocks would be blocked in slots too
    return run_agent()


def _fork(run: Callable[[], int], *, dies_by: signal.Signals) -> int:
    """The pid of a child that ends with what `run` returns, and that gets a signal when this process dies."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(by=dies_by)
        if os.getppid() == parent:  # else it was killed in between, and the kernel will not tell any more
            code = run()
    except BaseException:  # the agent's log is all that will be left of it
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch(agent: int, lease: Lease, standby: int) -> int:
    """Until the agent has ended, by itself or because its lease is over or the standby is gone."""
    polled = time.monotonic()
    while True:
        with contextlib.suppress(ChildProcessError):  # no children at the moment
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == agent:
                    return os.waitstatus_to_exitcode(status)
                if not pid:
                    break
        now = time.monotonic()
        if now - polled > _POLL_S + _PAUSE_S:
            # We did not run, so the agent, or the machine, hardly did: it could not hear a keeper that may be well.
            lease.renew()
        polled = now
        if lease.is_over or os.getppid() != standby:
            os.kill(agent, signal.SIGKILL)
            os.waitpid(agent, 0)
            return 3
        _wait_for_child(_POLL_S)


def _wait_for_child(limit_s: float) -> None:
    if hasattr(signal, "sigtimedwait"):
        signal.sigtimedwait([signal.SIGCHLD], limit_s)
    else:  # macOS
        time.sleep(min(limit_s, 0.05))


def _kill_children() -> None:
    """Kill our children until there are none: the children of a killed child become ours."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < deadline:
        children = _children_of(os.getpid())
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # all are reaped
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _children_of(pid: int) -> list[int]:
    found = []
    for entry in _stats():
        if entry[1] == pid:
            found.append(entry[0])
    return found


def _stats() -> list[tuple[int, int, int]]:
    """(pid, parent, session) of every process that /proc shows."""
    found = []
    with contextlib.suppress(OSError):  # not Linux
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:  # ended meanwhile
                # pid (command, which may hold anything) state ppid pgrp session ...
                fields = file.read().rpartition(b")")[2].split()
                found.append((int(name), int(fields[1]), int(fields[3])))
    return found


def processes_of_session(session: int) -> list[int]:
    return [pid for pid, _, its_session in _stats() if its_session == session]


def processes_below(pid: int) -> list[int]:
    """The descendants of a process, nearest first."""
    children: dict[int, list[int]] = {}
    for child, parent, _ in _stats():
        children.setdefault(parent, []).append(child)
    found = list(children.get(pid, []))
    for below in found:  # grows while it is walked
        found.extend(children.get(below, []))
    return found


def kill_session(session: int) -> None:
    """Kill a slot and what it started: a slot leads a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or has changed its user
        os.killpg(session, signal.SIGKILL)
    for pid in processes_of_session(session):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or has changed its user
            os.kill(pid, signal.SIGKILL)
