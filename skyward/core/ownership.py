"""Protection of paths on shared machines: skyward uses only paths that no other user can have planted.

Everybody may write to `/tmp`, so another user can put a folder, a link or a file where skyward expects its own.
`check_path` refuses those. Every path that skyward opens below such a folder is checked, directly or through its
folder. Folders that not everybody may write to are left to the user, who chose to work there.

Users can vouch for paths: `SKYWARD_TRUST` lists them, separated by colons. Everything below them is trusted too.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import sys

from ..errors import UsageError

CHECKED = "skyward.check_path"
"""Audit event of every check, with the path. A test compares these paths with the opened ones."""
_VARIABLE = "SKYWARD_TRUST"
_LONGEST_BASE = 60
"""Longest path of a runtime folder: a socket's path has 108 bytes at most."""


def check_path(path: str) -> None:
    """Refuse a path if another user may have planted it, or a folder or link on the way to it.

    This user, root, and the user who called `sudo` are trusted. Paths that do not exist yet are accepted.

    Raises:
        UsageError: A part of the path is not trusted. The message names its owner and how to trust it.
    """
    path = os.path.abspath(path)
    sys.audit(CHECKED, path)
    if not _is_trusted(path):
        for way in dict.fromkeys((path, os.path.realpath(path))):
            _check_way(way)


def check_file(path: str, what: str) -> None:
    """Refuse a file that controls what runs here, unless it belongs to this user.

    A link and its target must both belong to this user. A missing file is accepted.

    Args:
        path: The file.
        what: Name of the file in the error.

    Raises:
        UsageError: The file belongs to another user, everybody may write to it, or it is not a regular file.
    """
    check_path(path)
    path = os.path.abspath(path)
    if _is_trusted(path):
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a missing file is accepted
        link, file = os.lstat(path), os.stat(path)
        for status in (link, file):
            if status.st_uid not in _our_ids():
                raise UsageError(f"{what}={path}: belongs to {_name(status.st_uid)}; {_advice(path)}")
        if not stat.S_ISREG(file.st_mode):
            raise UsageError(f"{what}={path}: is not a regular file; name or write another one")
        if file.st_mode & stat.S_IWOTH:
            raise UsageError(f"{what}={path}: everybody may write to it; run `chmod o-w {path}`")


def make_private_folder(path: str) -> str:
    """Create a folder that nobody else can enter, parents included, or check an existing one. Returns the path.

    Raises:
        UsageError: The path is not a folder that belongs to this user alone.
        OSError: The folder cannot be created.
    """
    check_path(path)
    _make(path)
    check_path(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise UsageError(f"folder={path}: is a file or a link, but must be a folder; remove it") from None
    except OSError as error:
        if os.path.islink(path):  # ELOOP: Linux reports it for a link that leads to no folder
            raise UsageError(f"folder={path}: is a link, but must be a folder; remove it") from error
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
    """Create or check a private folder below the temporary folder: a short path, local to the machine.

    Raises:
        UsageError: See `make_private_folder`.
        OSError: The folder cannot be created.
    """
    name = f"{name}-{os.getuid()}"
    path = os.path.join(_temporary_folder(), name)
    return make_private_folder(path if len(path) <= _LONGEST_BASE else f"/tmp/{name}")  # TMPDIR can be anything


def _temporary_folder() -> str:
    """Return `tempfile.gettempdir()`, usually without that module: it imports every compression, and takes 0.7 MiB."""
    if "tempfile" not in sys.modules:  # whoever has imported it may have set its `tempdir`
        wanted = next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp")
        if os.path.isdir(wanted) and os.access(wanted, os.W_OK | os.X_OK):
            return os.path.abspath(wanted)
    import tempfile

    return tempfile.gettempdir()


def _make(path: str) -> None:
    """Create folders like `os.makedirs`, but with private parents; there, the umask decides."""
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        _make(parent)
    with contextlib.suppress(FileExistsError):  # another process created it
        os.mkdir(path, 0o700)


def _check_way(path: str) -> None:
    folder = os.sep
    for name in filter(None, path.split(os.sep)):
        entry = os.path.join(folder, name)
        try:
            status, mode = os.lstat(entry), os.stat(folder).st_mode
        except OSError:  # nothing exists there yet, or it is not accessible
            return
        if mode & stat.S_IWOTH:
            if not mode & stat.S_ISVTX:
                advice = f"run `chmod +t {folder}`, or, if you trust everybody here, `export {_VARIABLE}={folder}`"
                raise UsageError(f"folder={folder}: everybody may replace its contents; {advice}")
            if status.st_uid not in _our_ids():
                raise UsageError(f"path={entry}: belongs to {_name(status.st_uid)}; {_advice(entry)}")
        folder = entry


def _our_ids() -> set[int]:
    """Return the trusted users. Like git, root trusts the user who called `sudo`."""
    ids = {os.geteuid(), 0}
    with contextlib.suppress(KeyError, ValueError):  # not called through `sudo`
        if not os.geteuid():
            ids.add(int(os.environ["SUDO_UID"]))
    return ids


def _is_trusted(path: str) -> bool:
    trusted = [name.rstrip(os.sep) for name in os.environ.get(_VARIABLE, "").split(os.pathsep) if os.path.isabs(name)]
    return any(path == name or path.startswith(name + os.sep) for name in trusted)


def _advice(path: str) -> str:
    return f"remove it, or, if you trust it, run `export {_VARIABLE}={path}`"


def _name(uid: int) -> str:
    with contextlib.suppress(KeyError):  # no account has this number
        return f"{pwd.getpwuid(uid).pw_name} (user {uid})"
    return f"user {uid}"
