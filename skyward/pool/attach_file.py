"""File by which another machine, or another account, attaches to a detached pool. It holds the key of the pool.

For rented machines it also holds the journal: by that they are terminated, and their private key is beside it.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict
from typing import Any

from ..core.ownership import check_file
from ..errors import UsageError
from ..state import detached
from ..state.detached import DetachedPool
from ..state.journal import Journal, journals

_JOURNAL = "journal"
"""Field of the file with the files of a journal."""
_PATHS = ("key_file", "config_file")
"""Fields with a path of the machine that opened the pool."""


def export(name: str, path: str | os.PathLike[str]) -> None:
    """Write the file of a detached pool, readable by this user alone.

    Args:
        name: Name of the pool.
        path: File to write, which must not exist.

    Raises:
        UsageError: There is no such pool, or the file cannot be written.
    """
    pool = detached.find(name)
    content = asdict(pool)
    if identifier := pool.machine.get("journal"):
        journal = next((journal for journal in journals(pool.pool) if journal.id == identifier), None)
        if journal is None:
            raise _refuse(
                path, f"{pool.name} has no record of its machines anymore, so they have ended; open a new one"
            )
        content[_JOURNAL] = journal.packed()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(content, file)
    except FileExistsError as error:
        raise _refuse(path, "exists already; remove it, or choose another name") from error
    except OSError as error:
        raise _refuse(
            path, f"cannot be written: {error.strerror}; choose another folder, or free disk space"
        ) from error


def adopt(path: str | os.PathLike[str]) -> DetachedPool:
    """Read the file of a detached pool, and record the pool on this machine: its name is known here from now on.

    Paths of keys and SSH configurations that do not exist here are left out. So this user's own are used.

    Raises:
        UsageError: The file cannot be read, others may read it, or the pool has ended.
    """
    pool, journal = _read(path)
    for known in detached.detached_pools():
        if known.pool == pool.pool:
            if known.has_ended:
                raise detached.refuse_ended(known)
            return known
    if journal:
        try:
            Journal.unpack(pool.pool, pool.machine["journal"], journal)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _no_file_of_a_pool(path) from error
    detached.record(pool)
    return pool


def _read(path: str | os.PathLike[str]) -> tuple[DetachedPool, dict[str, str]]:
    """Return the pool, and the files of its journal; none if nothing is rented."""
    check_file(os.fspath(path), "file")
    try:
        with open(path, encoding="utf-8") as file:
            mode, text = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read()
    except OSError as error:
        advice = "write it with `skyward ps NAME --export FILE` on the machine that opened the pool, and copy it here"
        raise _refuse(path, f"cannot be read: {error.strerror}; {advice}") from error
    try:
        content = json.loads(text)
        pool, journal = detached.pool_of(_without_missing_paths(content)), content.get(_JOURNAL, {})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _no_file_of_a_pool(path) from error
    if mode & 0o077:
        raise _refuse(path, f"has the key of a pool, and others may use it (mode {mode:o}); run `chmod 600 {path}`")
    return pool, journal


def _no_file_of_a_pool(path: str | os.PathLike[str]) -> UsageError:
    return _refuse(path, "is not a file of a detached pool; write it again with `skyward ps NAME --export FILE`")


def _without_missing_paths(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_missing_paths(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: None
        if name in _PATHS and isinstance(inner, str) and _is_missing(inner)
        else _without_missing_paths(inner)
        for name, inner in value.items()
    }


def _is_missing(path: str) -> bool:
    return path != "none" and not os.path.exists(os.path.expanduser(path))


def _refuse(path: str | os.PathLike[str], problem: str) -> UsageError:
    return UsageError(f"file={os.fspath(path)!r}: {problem}", field="file", value=os.fspath(path))
