"""Folders of volumes on this machine's disk, and the locks by which several pools share them.

    $XDG_DATA_HOME/skyward/volumes/NAME         files of a volume, mode 0700 (default: ~/.local/share)
    $XDG_DATA_HOME/skyward/volume-locks/NAME    held shared by each agent that uses the volume, alone by its removal

The lock of a link, `link-DIGEST`, is held the same way: the last node that uses a link removes it. Kernels free the
locks of dead processes, so nothing has to be cleaned up after them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..core.ownership import make_private_folder
from ..errors import ProviderError, UsageError

_RECORD = "links.json"
"""Links that a node has made, in its folder: {"links": {link: target}, "unlinked": {path: reason}}."""


def volumes_folder() -> str:
    """Return the folder of this user's volumes. Raises UsageError if another user may have put it there."""
    return make_private_folder(os.path.join(_data_folder(), "volumes"))


def _data_folder() -> str:
    base = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.path.expanduser("~/.local/share")
    return os.path.join(base, "skyward")


@dataclass
class AttachedVolumes:
    """Volumes of one node. Its process holds their locks as long as it lives.

    `paths` has the folder of each volume by the path that the user wrote. `unlinked` says why there is no link.
    """

    paths: dict[str, str] = field(default_factory=dict)
    unlinked: dict[str, str] = field(default_factory=dict)
    locks: list[int] = field(default_factory=list)


def attach(names: Mapping[str, str], folder: str, cwd: str | None) -> AttachedVolumes:
    """Create the folders of volumes where they are missing, and lock them for the life of this process.

    Args:
        names: Path as the user wrote it -> name of the volume.
        folder: Folder of the node, which keeps the record for `detach`.
        cwd: Working folder of the tasks. Links are made at the users' paths, if nothing is there. None: no links.

    Raises:
        ProviderError: A folder cannot be created.
    """
    attached = AttachedVolumes()
    for path, name in names.items():
        try:
            root = volumes_folder()
            attached.locks.append(_locked(name))
            attached.paths[path] = make_private_folder(os.path.join(root, name))
        except (OSError, UsageError) as error:
            why = str(error) if isinstance(error, UsageError) else f"{error.strerror or error}: {_data_folder()}"
            raise ProviderError(
                f"volumes[{path!r}]: the folder of volume {name!r} cannot be created: {why}; free disk space, or set "
                "XDG_DATA_HOME for this login to a folder that it may write"
            ) from error
    if cwd is not None:
        for path, target in attached.paths.items():
            _link(path, target, cwd, attached, folder)
        _write_record(folder, {**_record_of(folder), "unlinked": attached.unlinked})
    return attached


def detach(folder: str) -> None:
    """Remove the links of a node whose processes are gone, except those that another node uses. Idempotent."""
    for link, target in _record_of(folder).get("links", {}).items():
        with contextlib.suppress(OSError), _alone(_lock_of(link)):  # in use, or already gone
            if os.readlink(link) == target:
                os.unlink(link)


def _link(path: str, target: str, cwd: str, attached: AttachedVolumes, folder: str) -> None:
    link = os.path.normpath(os.path.join(cwd, os.path.expanduser(path)))
    is_ours_alone = link.startswith(cwd.rstrip("/") + "/")  # the working folder ends with the node
    try:
        if is_ours_alone:
            os.makedirs(os.path.dirname(link), exist_ok=True)
        else:
            lock = _lock_of(link)
            _remove_stale(link, target, lock)
            attached.locks.append(_locked(lock))
            links = _record_of(folder).get("links", {})
            _write_record(folder, {"links": {**links, link: target}})  # before the link is made
        with contextlib.suppress(FileExistsError):
            os.symlink(target, link)
        if not os.path.islink(link) or os.readlink(link) != target:
            attached.unlinked[path] = "something else is there"
    except OSError as error:
        attached.unlinked[path] = (error.strerror or str(error)).lower()


def _remove_stale(link: str, target: str, lock: str) -> None:
    """Remove a link to another volume that a node left here when all its processes were killed at once."""
    with contextlib.suppress(OSError):  # there is no link, or a node uses it
        old = os.readlink(link)
        if old != target and os.path.dirname(old) == os.path.dirname(target):
            with _alone(lock):
                os.unlink(link)


def unlinked(folder: str) -> dict[str, str]:
    """Return the paths of a node's volumes that have no link, with the reasons."""
    return _record_of(folder).get("unlinked", {})


def _record_of(folder: str) -> dict[str, dict[str, str]]:
    try:
        with open(os.path.join(folder, _RECORD), encoding="utf-8") as file:
            record: dict[str, dict[str, str]] = json.load(file)
    except (OSError, ValueError):  # the node made no links
        return {}
    return record


def _write_record(folder: str, record: Mapping[str, Mapping[str, str]]) -> None:
    path = os.path.join(folder, _RECORD)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(f"{path}.new", path)


# Locks ----------------------------------------------------------------------------------------------------------------


def _lock_of(link: str) -> str:
    import hashlib  # every watchdog imports this module, and few need it

    return f"link-{hashlib.sha256(link.encode(errors='surrogateescape')).hexdigest()[:24]}"


def _open_lock(name: str) -> int:
    folder = make_private_folder(os.path.join(_data_folder(), "volume-locks"))
    return os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(name: str) -> int:
    """Take a lock together with others. A process that holds it alone does so for an instant."""
    lock = _open_lock(name)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(lock)  # the time of the last use
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Hold a lock alone. Raises BlockingIOError if anybody else holds it."""
    lock = _open_lock(name)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
