"""Folders of volumes on this machine's disk, and the locks by which several pools share them.

    $XDG_DATA_HOME/skyward/volumes/NAME         files of a volume, mode 0700 (default: ~/.local/share)
    $XDG_DATA_HOME/skyward/volume-caches/ID     files of a read-only object store, its URL and an index
    $XDG_DATA_HOME/skyward/volume-copies/ID     files of a writable object store, for one node; they end with it
    $XDG_DATA_HOME/skyward/volume-mounts/ID     mount of a read-only object store or an NFS export, for one node
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
from dataclasses import field
from typing import TYPE_CHECKING

from ..core.ownership import check_path, make_private_folder
from ..core.records import dataclass
from ..errors import ProviderError, UsageError

if TYPE_CHECKING:  # every agent and watchdog imports this module, and few have volumes
    from ..values.volume import PlacedVolume, Volume

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

    `unlinked` says why the volume of a path has no link.
    """

    places: list[PlacedVolume] = field(default_factory=list)
    unlinked: dict[str, str] = field(default_factory=dict)
    locks: list[int] = field(default_factory=list)


def attach(volumes: Mapping[str, Volume], folder: str, cwd: str | None) -> AttachedVolumes:
    """Create the folders of volumes where they are missing, and lock them for the life of this process.

    Args:
        volumes: Path as the user wrote it -> volume.
        folder: Folder of the node, which keeps the record for `detach`.
        cwd: Working folder of the tasks. Links are made at the users' paths, if nothing is there. None: no links.

    Raises:
        ProviderError: A folder cannot be created.
    """
    attached = AttachedVolumes()
    if not volumes:
        return attached
    from ..values.volume import PlacedVolume

    for path, volume in volumes.items():
        try:
            attached.places.append(PlacedVolume(path, _placed(path, volume, folder, attached.locks), volume))
        except (OSError, UsageError) as error:
            why = f"{error}"
            if isinstance(error, OSError):
                why = (
                    f"{error.strerror or error}: {_data_folder()}; free disk space, or set XDG_DATA_HOME for this "
                    "login to a folder that it may write"
                )
            problem = f"volumes[{path!r}]: the folder of {volume!r} cannot be created: {why}"
            raise ProviderError(problem) from error  # words: ok, a UsageError says what to do
    if cwd is not None:
        for place in attached.places:
            _link(place.path, place.folder, cwd, attached, folder)
        _write_record(folder, {**_record_of(folder), "unlinked": attached.unlinked})
    return attached


def _placed(path: str, volume: Volume, node: str, locks: list[int]) -> str:
    """Create and lock the folder of a volume. Raises OSError; UsageError."""
    if not volume.is_store and not volume.is_nfs:
        root = volumes_folder()
        locks.append(_locked(volume.source))
        return make_private_folder(os.path.join(root, volume.source))
    kind = _kind_of(volume)
    if kind != "caches":
        _remove_ended()
        name = f"{os.path.basename(node)}-{_digest(path)}"
    else:
        name = _digest(volume.source)
    locks.append(_locked(f"{kind}-{name}"))
    home = make_private_folder(os.path.join(_data_folder(), f"volume-{kind}", name))
    with open(os.path.join(home, "source"), "w", encoding="utf-8") as file:
        file.write(volume.source)
    return make_private_folder(os.path.join(home, "files"))


def _kind_of(volume: Volume) -> str:
    if volume.is_nfs or volume.mount:
        return "mounts"
    if volume.read_only is False:
        return "copies"
    if volume.mount is None:
        from .mounts import can_mount  # as above

        if can_mount(volume):
            return "mounts"
    return "caches"


def is_for_mount(place: PlacedVolume) -> bool:
    """Return whether the folder of a volume is one to mount on."""
    return os.path.dirname(os.path.dirname(place.folder)).endswith("volume-mounts")


def _remove_ended() -> None:
    """Remove the copies and mounts of nodes that are gone."""
    for kind in ("copies", "mounts"):
        for name in _names_in(f"volume-{kind}"):
            home = os.path.join(_data_folder(), f"volume-{kind}", name)
            with contextlib.suppress(OSError), _alone(f"{kind}-{name}"):  # its node lives
                if kind == "mounts":
                    from .mounts import unmount  # as above

                    unmount(os.path.join(home, "files"))  # else files on the server would be deleted
                _remove(home)


def make_room(needed: int, limit: int) -> None:
    """Remove caches that no node uses, least recently used first, until `needed` more bytes fit into the limit."""
    root = os.path.join(_data_folder(), "volume-caches")
    caches = []
    for name in _names_in("volume-caches"):
        with contextlib.suppress(OSError):  # another process removed it
            index = os.stat(os.path.join(root, name, "index.json"))
            caches.append((index.st_mtime, name, _size(os.path.join(root, name, "files"))))
    total = needed + sum(size for _, _, size in caches)
    for _, name, size in sorted(caches):
        if total <= limit:
            return
        with contextlib.suppress(OSError), _alone(f"caches-{name}"):  # a node uses it
            _remove(os.path.join(root, name))
            total -= size


def _remove(folder: str) -> None:
    import shutil  # it imports every compression, and each process of a node imports this module

    shutil.rmtree(folder, ignore_errors=True)


def _names_in(kind: str) -> list[str]:
    folder = os.path.join(_data_folder(), kind)
    try:
        check_path(folder)
        return os.listdir(folder)
    except (OSError, UsageError):  # there are none, or another user made the folder
        return []


def _size(folder: str) -> int:
    paths = (os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(path).st_size for path in paths)


def detach(folder: str) -> None:
    """Remove the links, copies and mounts of a node whose processes are gone. Idempotent.

    Links that another node uses stay.
    """
    _remove_ended()
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
        if old != target and old.startswith(os.path.join(_data_folder(), "volume")):
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
    return f"link-{_digest(link)}"


def _digest(text: str) -> str:
    import hashlib  # as above

    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]


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
