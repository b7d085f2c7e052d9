"""Which paths of a shared machine may be used: those that no stranger can have put there.

Everybody may write to `/tmp`, so a stranger can put a folder, a link or a file where skyward expects one of its own.
`check_path` refuses that. Every path that skyward opens below such a folder goes through it, by itself or with the
folder that it lies in. Folders that everybody may not write to are left to the user, who chose to work there.

A user may vouch for paths: `SKYWARD_TRUST` names them, separated by colons. What lies below them is trusted too.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import sys
import tempfile

from ..errors import UsageError

__all__ = ["CHECKED", "check_file", "check_path", "make_private_folder", "runtime_folder"]

CHECKED = "skyward.check_path"
"""Audit event of every check, with the path: a test compares it with what is opened."""
_VARIABLE = "SKYWARD_TRUST"
_LONGEST_BASE = 60
"""Of a runtime folder: a socket's path has 108 bytes at most."""


def check_path(path: str) -> None:
    """Refuse a path if a stranger may have put it there, or a folder or link on the way to it.

    A stranger is anybody but this user, root, and the user who called `sudo`. A path that is not there yet passes.

    Raises:
        UsageError: it names what belongs to whom, and how to trust it.
    """
    path = os.path.abspath(path)
    sys.audit(CHECKED, path)
    if not _is_trusted(path):
        for way in dict.fromkeys((path, os.path.realpath(path))):
            _check_way(way)


def check_file(path: str, what: str) -> None:
    """Refuse a file that decides what runs here, unless it is this user's: `what` names it in the error.

    A link must be this user's, and so must what it leads to. A file that is not there passes.

    Raises:
        UsageError: it belongs to another user, everybody may write to it, or it is no plain file.
    """
    check_path(path)
    path = os.path.abspath(path)
    if _is_trusted(path):
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # what is not there belongs to nobody
        link, file = os.lstat(path), os.stat(path)
        for status in (link, file):
            if status.st_uid not in _our_ids():
                raise UsageError(f"{what}={path}: belongs to {_name(status.st_uid)}; {_advice(path)}")
        if not stat.S_ISREG(file.st_mode):
            raise UsageError(f"{what}={path}: is no plain file; remove it")
        if file.st_mode & stat.S_IWOTH:
            raise UsageError(f"{what}={path}: everybody may write to it; run `chmod o-w {path}`")


def make_private_folder(path: str) -> str:
    """Make a folder that nobody else can enter, parents included, or check the one that is there. Returns the path.

    Raises:
        UsageError: what is there is not a folder of this user's alone.
        OSError: it cannot be made.
    """
    check_path(path)
    _make(path)
    check_path(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise UsageError(f"folder={path}: is a file or a link, and should be a folder; remove it") from None
    except OSError as error:
        if os.path.islink(path):  # ELOOP: Linux says so of a link that leads to no folder
            raise UsageError(f"folder={path}: is a link, and should be a folder; remove it") from error
        raise
    try:
        status = os.fstat(fd)
        if status.st_uid not in _our_ids() and not _is_trusted(os.path.abspath(path)):
            raise UsageError(f"folder={path}: belongs to {_name(status.st_uid)}; {_advice(path)}")
        if status.st_mode & stat.S_IWOTH:
            raise UsageError(f"folder={path}: everybody may write to it; remove it")
        if status.st_mode & 0o077:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return path


def runtime_folder(name: str) -> str:
    """Make or check the private folder of that name below the temporary folder: short, and local to the machine.

    Raises:
        UsageError: see `make_private_folder`.
        OSError: it cannot be made.
    """
    name = f"{name}-{os.getuid()}"
    path = os.path.join(tempfile.gettempdir(), name)
    return make_private_folder(path if len(path) <= _LONGEST_BASE else f"/tmp/{name}")  # TMPDIR can be anything


def _make(path: str) -> None:
    """As `os.makedirs`, which would give the parents whatever the umask lets through."""
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        _make(parent)
    with contextlib.suppress(FileExistsError):  # another process made it
        os.mkdir(path, 0o700)


def _check_way(path: str) -> None:
    folder = os.sep
    for name in filter(None, path.split(os.sep)):
        entry = os.path.join(folder, name)
        try:
            status, mode = os.lstat(entry), os.stat(folder).st_mode
        except OSError:  # nothing is there yet, or nobody can go there
            return
        if mode & stat.S_IWOTH:
            if not mode & stat.S_ISVTX:
                advice = f"run `chmod +t {folder}`, or, if you trust everybody here, `export {_VARIABLE}={folder}`"
                raise UsageError(f"folder={folder}: everybody may exchange what is in it; {advice}")
            if status.st_uid not in _our_ids():
                raise UsageError(f"path={entry}: belongs to {_name(status.st_uid)}; {_advice(entry)}")
        folder = entry


def _our_ids() -> set[int]:
    """As git does: root in a folder of the user who called `sudo` is that user."""
    ids = {os.geteuid(), 0}
    with contextlib.suppress(KeyError, ValueError):  # not by `sudo`
        if not os.geteuid():
            ids.add(int(os.environ["SUDO_UID"]))
    return ids


def _is_trusted(path: str) -> bool:
    given = [name.rstrip(os.sep) for name in os.environ.get(_VARIABLE, "").split(os.pathsep) if os.path.isabs(name)]
    return any(path == name or path.startswith(name + os.sep) for name in given)


def _advice(path: str) -> str:
    return f"remove it, or, if you trust it, run `export {_VARIABLE}={path}`"


def _name(uid: int) -> str:
    with contextlib.suppress(KeyError):  # no account of that number
        return f"{pwd.getpwuid(uid).pw_name} (user {uid})"
    return f"user {uid}"
