"""Local folder of a connection: private, short, and removed with it."""

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

_OLD_S = 600.0
_END_S = 2.0
_KILLED_S = 1.0
_OWNER = "owner"
_FOLDER = "skyward-ssh"
"""Parent of all folders, below the temporary one. Short, because OpenSSH adds 17 bytes to a socket's path."""


def close_folder(folder: str, pid_of: Callable[[], int]) -> None:
    """End the process that holds the connection, given by `pid_of` or recorded, and remove the folder.

    Another process may be reconnecting at this moment. It gets a moment to finish, and what it starts is ended too.
    """
    with contextlib.ExitStack() as held:
        # Another process may hold the lock for too long, or the folder may be gone: end the holder regardless.
        with contextlib.suppress(TimeoutError, FileNotFoundError):
            held.enter_context(locked(folder, timeout_s=_END_S))
        _end_process(folder, pid_of())
        shutil.rmtree(folder, ignore_errors=True)


def make_folder() -> str:
    """Create a folder, and remove folders of dead programs on the way."""
    root = runtime_folder(_FOLDER)
    collect_garbage(root)
    folder = tempfile.mkdtemp(prefix="", dir=root)  # mode 0700
    with open(os.path.join(folder, _OWNER), "w") as file:
        file.write(str(os.getpid()))
    return folder


def collect_garbage(root: str = "") -> list[str]:
    """Remove the folders of connections that ended long ago, and return their paths."""
    removed = []
    root = root or runtime_folder(_FOLDER)
    os.utime(root)
    # Take the time from the file system: by a wrong local clock a new folder would look old.
    now = os.stat(root).st_mtime
    for name in os.listdir(root):
        path = os.path.join(root, name)
        with contextlib.suppress(OSError):  # another process has just removed it
            # The socket proves nothing: it stays when its process is killed.
            is_used = _has_owner(path) or _is_of(path, _recorded(path))
            if not is_used and now - os.stat(path).st_mtime > _OLD_S:
                with locked(path, timeout_s=0):  # else a keeper is reconnecting right now
                    shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _has_owner(folder: str) -> bool:
    """Return whether the program that created the folder is alive. It may use its connection again after any pause."""
    try:
        with open(os.path.join(folder, _OWNER)) as file:
            os.kill(int(file.read()), 0)
    except (OSError, ValueError):  # no such process, or none recorded
        return False
    return True


@contextlib.contextmanager
def locked(folder: str, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock that lets one process connect. Raises TimeoutError; FileNotFoundError if the folder is gone."""
    fd = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{folder}/lock: another process holds it; try again later") from None
                time.sleep(0.02)
        # close_folder may have removed the file while we waited: a lock on an unlinked file excludes nobody.
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(f"{folder}: was removed; connect again")
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def connecting(target: SSHTarget, folder: str, limit_s: float) -> Iterator[None]:
    """Hold the folder's lock while connecting. Raises Unreachable: no time is left, or it was closed."""
    try:
        with locked(folder, timeout_s=2 * limit_s):
            yield
    except TimeoutError as error:
        message = f"ssh {target}: no connection within {limit_s:.3g} s; try again, because another process connects"
        raise Unreachable(message, host=str(target), is_final=False) from error
    except FileNotFoundError as error:
        if os.path.isdir(folder):
            raise
        message = f"ssh {target}: the connection was closed here; open the pool again"
        raise Unreachable(message, host=str(target), is_final=True) from error


# The process that holds the connection -----------------------------------------------------------------------------


def record_process(folder: str, pid: int) -> None:
    """Record the process, so that it can be killed when it no longer answers.

    Raises:
        FileNotFoundError: the folder is gone, because the connection was closed meanwhile. The process is killed,
            since nobody else would end it.
    """
    try:
        with open(os.path.join(folder, "pid"), "w") as file:
            file.write(str(pid))
    except FileNotFoundError:
        with contextlib.suppress(ProcessLookupError):  # already exited
            os.kill(pid, signal.SIGKILL)
        raise


def kill_process(folder: str) -> None:
    """Kill the recorded process at once, if it is still there."""
    pid = _recorded(folder)
    if pid and _is_of(folder, pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # already exited
            os.kill(pid, signal.SIGKILL)


def _end_process(folder: str, pid: int) -> None:
    """Terminate the process so that it can tidy up; kill it if that takes too long."""
    pid = pid or _recorded(folder)
    if not pid or not _is_of(folder, pid):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # already exited
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
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "pid")) as file:  # none was recorded
        return int(file.read())
    return 0


def _is_of(folder: str, pid: int) -> bool:
    """Return whether the folder's process still has the pid. Pids are reused; its command line names the folder."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return folder.encode() in file.read()
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    done = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, check=False)
    return folder.encode() in done.stdout
