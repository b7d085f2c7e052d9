"""Parents of an agent: they kill everything below them when the agent dies or its lease runs out.

The watchdog is the subreaper of the node's processes. Every process that user code starts becomes a child of the
watchdog, however it detaches itself, and is killed. The watchdog does nothing else, so it does not fail together with
the agent.

The standby is the watchdog's parent, and a subreaper too. When the watchdog is killed, its children become the
standby's, which kills them. When the standby is killed, the watchdog notices and ends the node. A detached process
escapes only if both are killed at the same moment.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable

from ...core.process import adopt_orphans, die_with_parent, process_table
from ...state.volumes import detach
from .limit_groups import remove_groups

_LEAST_CHECK_S, _MOST_CHECK_S = 0.25, 1.0
_PAUSE_S = 1.0
"""Delay of a wake-up that shows that this process was stopped: a paused machine, SIGSTOP, a frozen cgroup."""
_KILL_LIMIT_S = 5.0
_RESTARTS = 5
"""Starts in a row of a process that is killed within `_EARLY_S` seconds: something is wrong with it."""
_EARLY_S = 10.0
_FAILED = 1
"""Exit code of a process that an exception has ended."""
_REMOVALS, _REMOVE_PAUSE_S = 20, 0.1
_CONTACT_AT = 8
"""Place of the flag behind the time of the last contact."""


class Starter:
    """The process that has started this node, on the same machine. It reads the node's standard output for its life.

    That pipe closes also when the starter becomes another program. But processes that it has forked may hold the pipe
    open, so the process itself counts too.

    Args:
        pid: Its process id.
        output: Descriptor of the pipe; None: there is none, and the process alone counts.
    """

    def __init__(self, pid: int, output: int | None = 1) -> None:
        self._pid = pid
        self.fds = [] if output is None else [output]
        """Descriptors that are readable, or in error, once the starter is gone."""
        self._has_pidfd = False
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # it is dead, or the kernel cannot: `is_gone` finds out
                self.fds.append(os.pidfd_open(pid))
                self._has_pidfd = True
        self._poll = select.poll()
        for fd in self.fds:
            self._poll.register(fd, 0 if fd == output else select.POLLIN)

    @property
    def is_gone(self) -> bool:
        if self._poll.poll(0):
            return True
        if self._has_pidfd:
            return False
        try:
            os.kill(self._pid, 0)
        except OSError as error:
            return error.errno == errno.ESRCH
        return False


class Lease:
    """Time of the last contact with the keeper, in memory shared by agent and watchdog. Never a limit on job length.

    Args:
        lease_s: Longest time without contact, in seconds.
        file: File that is touched at each renewal; empty: none.
        starter: Process whose life renews the lease until the first contact with a keeper. Nodes on the client's own
            machine have no keeper. None: only contact renews the lease.
        check_s: Seconds between the watchdog's looks at the lease. Each wakes a processor that may sleep. None: an
            eighth of the lease, between 0.25 and 1.
    """

    def __init__(
        self, lease_s: float, file: str = "", *, starter: Starter | None = None, check_s: float | None = None
    ) -> None:
        self.lease_s = lease_s
        self.check_s = min(_MOST_CHECK_S, max(_LEAST_CHECK_S, lease_s / 8)) if check_s is None else check_s
        self.starter = starter
        self._file = file
        self._page = mmap.mmap(-1, 4096)
        self.renew()

    def renew(self) -> None:
        struct.pack_into("<d", self._page, 0, time.monotonic())
        if self._file:
            with contextlib.suppress(OSError):  # without renewals the machine ends, as it does without contact
                os.utime(self._file)

    def contact(self) -> None:
        """Renew the lease, because a keeper has been heard."""
        self._page[_CONTACT_AT] = 1
        self.renew()

    @property
    def needs_starter(self) -> bool:
        """Return whether the starter's life counts: no keeper has made contact."""
        return self.starter is not None and not self._page[_CONTACT_AT]

    @property
    def had_no_contact(self) -> bool:
        """Return whether only contact renews the lease, and there was none."""
        return self.starter is None and not self._page[_CONTACT_AT]

    @property
    def is_over(self) -> bool:
        (renewed,) = struct.unpack_from("<d", self._page, 0)
        return bool(time.monotonic() - renewed > self.lease_s)


def end_machine(lease_file: str) -> None:
    """Let a rented machine power itself off now. If the file cannot be written, the end of its lease does it."""
    with contextlib.suppress(OSError), open(lease_file, "w", encoding="ascii") as file:
        file.write("the pool has ended\n")


def guard(run_agent: Callable[[], int], lease: Lease, folder: str, *, restarts: bool = False) -> int:
    """Become the standby: fork the watchdog, which forks the agent. Clean up when they end.

    Args:
        run_agent: The agent itself; returns its exit code.
        lease: Lease of the node.
        folder: Folder of the node, which is removed at the end.
        restarts: Whether a process that a signal or an exception has ended is started again, as a head can be. An agent
            cannot.

    Returns:
        The exit code for this process.
    """
    # A client that ignores SIGCHLD passes that on, and then no child can be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent is told to end by a frame, and its parents follow it
    adopt_orphans()
    standby = os.getpid()
    # SIGCHLD, not SIGKILL: the watchdog must outlive the standby long enough to end the node, and waits for SIGCHLD.
    watchdog = _fork(lambda: _run_watchdog(run_agent, lease, folder, standby, restarts), dies_by=signal.SIGCHLD)
    code = os.waitstatus_to_exitcode(os.waitpid(watchdog, 0)[1])
    _kill_children()
    remove_node(folder)
    return code


def _run_watchdog(run_agent: Callable[[], int], lease: Lease, folder: str, standby: int, restarts: bool) -> int:
    adopt_orphans()
    # Blocked, so that a death between `waitpid` and `sigtimedwait` stays pending and ends the wait at once.
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGCHLD])
    code, left = _run_once(run_agent, lease, standby), _RESTARTS if restarts else 0
    while (code < 0 or code == _FAILED) and left:
        began = time.monotonic()
        lease.renew()
        code = _run_once(run_agent, lease, standby)
        left = left - 1 if time.monotonic() - began < _EARLY_S else _RESTARTS
    remove_node(folder)  # here too, because the standby may be dead
    return code


def _run_once(run_agent: Callable[[], int], lease: Lease, standby: int) -> int:
    """Run the agent to its end, and kill everything below. Return its exit code, negative if a signal killed it."""
    code = _watch(_fork(lambda: _run_agent(run_agent), dies_by=signal.SIGKILL), lease, standby)
    _kill_children()
    return code


def remove_node(folder: str) -> None:
    """Remove the folder of a node whose processes are gone, its links to volumes, and its groups. Idempotent."""
    import shutil  # only at the end: it imports every compression, in processes that only wait

    remove_groups(folder)
    detach(folder)
    for _ in range(_REMOVALS):  # a process that was killed a moment ago may have made another file meanwhile
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.isdir(folder):
            break
        time.sleep(_REMOVE_PAUSE_S)
    base, first = os.path.dirname(folder), beside(folder)
    with contextlib.suppress(OSError):  # the folder of all nodes is gone
        for name in os.listdir(base):
            if name.startswith(first):
                shutil.rmtree(os.path.join(base, name), ignore_errors=True)


def beside(folder: str) -> str:
    """Return how the names of folders for Ray begin that go with a node's folder.

    They are not below it, because a name that is short leaves room for the paths of Ray's sockets.
    """
    return f"ray-{folder.rpartition('-')[2]}-"


def _run_agent(run_agent: Callable[[], int]) -> int:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # inherited: signals that the client blocks would stay blocked
    return run_agent()


def _fork(run: Callable[[], int], *, dies_by: signal.Signals) -> int:
    """Fork a child that exits with the result of `run`, and that gets a signal when this process dies."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = _FAILED
    try:
        die_with_parent(by=dies_by)
        # If the parent died before die_with_parent, no signal will come: do not even start.
        if os.getppid() == parent:
            code = run()
    except BaseException:  # the traceback in the agent's log is all that remains of it
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch(agent: int, lease: Lease, standby: int) -> int:
    """Wait for the agent's end: by itself, by the end of its lease, or by the loss of the standby."""
    polled = time.monotonic()
    while True:
        with contextlib.suppress(ChildProcessError):  # no children right now
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == agent:
                    return os.waitstatus_to_exitcode(status)
                if not pid:
                    break
        now = time.monotonic()
        # After a pause, this process did not run, and so hardly did the agent: it could not hear a keeper that may be
        # well.
        starter = lease.starter if lease.needs_starter else None
        if now - polled > lease.check_s + _PAUSE_S or (starter is not None and not starter.is_gone):
            lease.renew()
        polled = now
        if lease.is_over or os.getppid() != standby:
            if lease.is_over and lease.had_no_contact:  # the client reads it, if it still waits for the start
                with contextlib.suppress(OSError):
                    os.write(2, f"lease_s={lease.lease_s:g}: nobody renewed it in time; set a longer one\n".encode())
            os.kill(agent, signal.SIGKILL)
            os.waitpid(agent, 0)
            return 3
        _wait_for_child(lease.check_s)


def _wait_for_child(limit_s: float) -> None:
    if hasattr(signal, "sigtimedwait"):
        signal.sigtimedwait([signal.SIGCHLD], limit_s)
    else:  # macOS
        time.sleep(min(limit_s, 0.05))


def _kill_children() -> None:
    """Kill children until none is left: those of a killed child become ours."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < deadline:
        children = _children_of(os.getpid())
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):  # already exited
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # all reaped
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _children_of(pid: int) -> list[int]:
    return [child for child, parent, _ in process_table() if parent == pid]


def processes_of_session(session: int) -> list[int]:
    return [pid for pid, _, leader in process_table() if leader == session]


def kill_session(session: int) -> None:
    """Kill a slot and what it started: a slot leads its own session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # already exited, or runs as another user
        os.killpg(session, signal.SIGKILL)
    for pid in processes_of_session(session):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # already exited, or runs as another user
            os.kill(pid, signal.SIGKILL)
