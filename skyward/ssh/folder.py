"""A connection's folder on this machine: private, short, and removed with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

from ..core.ownership import runtime_folder
from ..errors import Unreachable
from .target import SSHTarget

__all__ = [
    "close_folder",
    "collect_garbage",
    "connecting",
    "kill_process",
    "locked",
    "make_folder",
    "record_process",
]

_OLD_S = 600.0
_END_S = 2.0
_KILLED_S = 1.0
_OWNER = "owner"
_FOLDER = "skyward-ssh"
"""Of all connections, below the temporary one. The client of OpenSSH adds 17 bytes of its own to a socket's path."""


def close_folder(folder: str, pid_of: Callable[[], int]) -> None:
    """End the process that holds the connection, the one of `pid_of` or the recorded one, and remove the folder.

    Whoever makes the connection anew at this very time is waited for, for a moment: what he starts is ended too.
    """
    with contextlib.ExitStack() as held:
        # Another one holds it for too long, or the folder is gone.
        with contextlib.suppress(TimeoutError, FileNotFoundError):
            held.enter_context(locked(folder, timeout_s=_END_S))
        _end_process(folder, pid_of())
        shutil.rmtree(folder, ignore_errors=True)


def make_folder() -> str:
    """A new one. What connections of dead programs left is removed on the way."""
    root = runtime_folder(_FOLDER)
    collect_garbage(root)
    folder = tempfile.mkdtemp(prefix="", dir=root)  # mode 0700
    with open(os.path.join(folder, _OWNER), "w") as file:
        file.write(str(os.getpid()))
    return folder


def collect_garbage(root: str = "") -> list[str]:
    """Remove the folders of connections that ended long ago; which they were."""
    removed = []
    root = root or runtime_folder(_FOLDER)
    os.utime(root)
    # The file system's: by a wrong clock of ours a folder that was made a moment ago would be old.
    now = os.stat(root).st_mtime
    for name in os.listdir(root):
        path = os.path.join(root, name)
        with contextlib.suppress(OSError):  # removed meanwhile by another process
            # Not by its socket: that of a process that was killed stays.
            is_used = _has_owner(path) or _is_of(path, _recorded(path))
            if not is_used and now - os.stat(path).st_mtime > _OLD_S:
                with locked(path, timeout_s=0):  # else a keeper is making it anew
                    shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _has_owner(folder: str) -> bool:
    """Whether the program that made it is alive: it may use its connection again, however long it did not."""
    try:
        with open(os.path.join(folder, _OWNER)) as file:
            os.kill(int(file.read()), 0)
    except (OSError, ValueError):  # no such process, or none was recorded
        return False
    return True


@contextlib.contextmanager
def locked(folder: str, *, timeout_s: float) -> Iterator[None]:
    """One process at a time makes the connection. Raises TimeoutError; FileNotFoundError when the folder is gone."""
    fd = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds {folder}/lock") from None
                time.sleep(0.02)
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(f"{folder} was removed")
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def connecting(target: SSHTarget, folder: str, limit_s: float) -> Iterator[None]:
    """Hold the folder's lock while its connection is made. Raises Unreachable: no time is left, or it was closed."""
    try:
        with locked(folder, timeout_s=2 * limit_s):
            yield
    except TimeoutError as error:
        message = f"ssh {target}: no connection within {limit_s:.3g} s"
        raise Unreachable(message, host=str(target), is_final=False) from error
    except FileNotFoundError as error:
        if os.path.isdir(folder):
            raise
        message = f"ssh {target}: the connection was closed here"
        raise Unreachable(message, host=str(target), is_final=True) from error


# The process that holds the connection -----------------------------------------------------------------------------


def record_process(folder: str, pid: int) -> None:
    """So that it can be killed when it does not answer any more. Raises FileNotFoundError when the folder is gone:
    the connection was closed meanwhile, and nobody would end the process.
    """
    try:
        with open(os.path.join(folder, "pid"), "w") as file:
            file.write(str(pid))
    except FileNotFoundError:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)
        raise


def kill_process(folder: str) -> None:
    """The one that was recorded, at once, if it is still there."""
    pid = _recorded(folder)
    if pid and _is_of(folder, pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.kill(pid, signal.SIGKILL)


def _end_process(folder: str, pid: int) -> None:
    """It may tidy up; when it takes too long it is killed."""
    pid = pid or _recorded(folder)
    if not pid or not _is_of(folder, pid):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
        os.kill(pid, signal.SIGTERM)
        if not _has_gone(folder, pid, _END_S):
            os.kill(pid, signal.SIGKILL)
            _has_gone(folder, pid, _KILLED_S)


def _has_gone(folder: str, pid: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while _is_of(folder, pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _recorded(folder: str) -> int:
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "pid")) as file:  # no process was recorded
        return int(file.read())
    return 0


def _is_of(folder: str, pid: int) -> bool:
    """Pids are used again; the command line of the process that is meant names its folder."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return folder.encode() in file.read()
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    done = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, check=False)
    return folder.encode() in done.stdout
