"""Two folders get each other's names in one step, where the system and the file system can do that."""

from __future__ import annotations

import ctypes
import os

__all__ = ["exchange"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Source: linux/fcntl.h, linux/fs.h."""


def exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Exchange two names. False where nothing was done: NFS and macOS cannot, nor can libraries of C without it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    # Whatever the reason of a refusal, the caller's other way meets it too, and says it.
    return int(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)) == 0
