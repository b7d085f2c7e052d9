"""Folder of a hub, and the lock file beside its SQLite database: one process writes, and a second one is refused."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ...errors import UsageError


def make_folder(name: str, folder: Path) -> None:
    """Make a folder and those above it, where they are missing.

    Args:
        name: Name of the setting, for errors.
        folder: Its path.

    Raises:
        UsageError: It cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(name, folder, error) from error


def _unwritable(name: str, folder: Path, error: OSError) -> UsageError:
    return UsageError(f"{name}={str(folder)!r}: cannot be written ({error.strerror}); name a folder of yours")


class ProcessLock:
    """Hold `path` locked for this process until `release`. The kernel releases it when the process dies.

    Raises:
        UsageError: Another process holds it, or the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable("data", path.parent, error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise UsageError(
                f"data={str(path.parent)!r}: process {pid} has this database open, and SQLite serves one hub process; "
                f"stop that process, or use PostgreSQL for several"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    @property
    def is_in_place(self) -> bool:
        """Return whether the locked file is still at its path: somebody may have removed it, and made another one."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except OSError:
            return False

    def release(self) -> None:
        """Let another process in. Calling it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
