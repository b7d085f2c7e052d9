"""From files that ranks wrote to a checkpoint that is there: one step, after which it is whole, or never was.

On a file system the files are staged in `.tmp-checkpoint-<id>-<token>` beside their place, and the folder is renamed.
In an object store, which cannot rename, they lie in `checkpoint-<id>/data-<token>/`, and the manifest, put last by one
request, is the commit. So they do on a file system that cannot exchange two names (NFS), where a checkpoint is
replaced. At every moment either the old one is there or the new one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from ...core.process import start_time
from .folders import Folder, LocalFolder, flush_folder
from .layout import OLD, STAGING, name_of, put_back
from .manifest import MANIFEST, Manifest
from .objects import ObjectFolder

__all__ = ["InsideStaging", "LocalStaging", "Staging", "discard", "new_token", "staging_in", "sweep"]

_log = logging.getLogger(__name__)

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Source: linux/fcntl.h, linux/fs.h."""

_TOKEN = re.compile(r"(?P<host>[0-9a-f]{8})\.(?P<pid>\d+)\.(?P<started>\d*)$")
_DATA = "data-"
_NAMED = re.compile(r'"path": "([^"/]+)')
"""First names of the files in a manifest, which may be damaged."""
_ABANDONED_S = 3600.0
"""Staging of another machine, whose processes cannot be asked for, is left over when nothing was written for so long:
a save that takes longer writes meanwhile."""


class Staging(Protocol):
    """One save's files until they are committed. All ranks make it from the same three values."""

    @property
    def folder(self) -> Folder:
        """What to write to, and what paths in the manifest are relative to while they are written."""

    @property
    def prefix(self) -> str:
        """In front of a file's name, in the manifest."""

    def begin(self) -> None:
        """Rank 0's, before the others write."""

    def commit(self, manifest: Manifest) -> str:
        """Rank 0's, when all ranks have written and flushed their files. Gives the checkpoint's path."""

    def discard(self) -> None:
        """Rank 0's, when no rank writes any longer."""


class LocalStaging:
    """Beside its place, then renamed to it. One that is there gets the name of the staging in the same step. Where the
    file system cannot do that, the files are put into the checkpoint as `InsideStaging` has them.
    """

    def __init__(self, parent: LocalFolder, name: str, token: str) -> None:
        self._parent, self._name, self._token = parent, name, token
        self._inside: InsideStaging | None = None
        self.folder: Folder = parent.child(f"{STAGING}{name}-{token}")
        self.prefix = ""

    def begin(self) -> None:
        Path(self.folder.path).mkdir(parents=True)

    def commit(self, manifest: Manifest) -> str:
        with self.folder.create(MANIFEST) as file:
            file.write(manifest.to_json())
        staged, final = Path(self.folder.path), Path(self._parent.path, self._name)
        # Once for all names, those of other ranks' files too: every flush costs a commit of the file system's journal.
        for folder in [staged, *(below for below in staged.rglob("*") if below.is_dir())]:
            flush_folder(folder)
        if not final.exists():
            staged.rename(final)
        elif not _exchange(staged, final):
            return self._commit_inside(manifest)
        flush_folder(self._parent.path)
        _remove_replaced(self.folder)
        return str(final)

    def discard(self) -> None:
        self.folder.remove()
        if self._inside is not None:
            self._inside.discard()

    def _commit_inside(self, manifest: Manifest) -> str:
        inside = self._inside = InsideStaging(self._parent, self._name, self._token)
        staged = Path(self.folder.path)
        (staged / MANIFEST).unlink()
        staged.rename(inside.folder.path)
        files = tuple(replace(file, path=f"{inside.prefix}{file.path}") for file in manifest.files)
        return inside.commit(replace(manifest, files=files))


class InsideStaging:
    """In `data-<token>/` of the checkpoint itself. It counts when the manifest names it."""

    def __init__(self, parent: Folder, name: str, token: str) -> None:
        self._final = parent.child(name)
        self._new_manifest = f"{STAGING}manifest-{token}" if isinstance(parent, LocalFolder) else MANIFEST
        self._may_be_committed = False
        self.prefix = f"{_DATA}{token}/"
        self.folder: Folder = self._final.child(f"{_DATA}{token}")

    def begin(self) -> None:
        self._final.names()  # a store that cannot be reached says so before anything is sent

    def commit(self, manifest: Manifest) -> str:
        self._may_be_committed = True
        text = manifest.to_json()
        try:
            self._put(text)
        except OSError:
            # It may be that only the answer was lost.
            if self._final.read([MANIFEST]).get(MANIFEST) != text:
                if isinstance(self._final, LocalFolder):  # where an error is an answer
                    self._may_be_committed = False
                    self._final.child(self._new_manifest).remove()
                raise
        _remove_replaced(self._final, besides=(MANIFEST, self.prefix.rstrip("/")))
        return self._final.path

    def _put(self, manifest: bytes) -> None:
        """In one step, in place of the one that is there."""
        with self._final.create(self._new_manifest) as file:
            file.write(manifest)
        if self._new_manifest != MANIFEST:
            Path(self._final.path, self._new_manifest).replace(Path(self._final.path, MANIFEST))
            flush_folder(self._final.path)

    def discard(self) -> None:
        """What a manifest names, or may come to name, stays: `sweep` clears it when nobody can write any more."""
        if not self._may_be_committed:
            self.folder.remove()


def _remove_replaced(folder: Folder, *, besides: tuple[str, ...] = ()) -> None:
    """The data of a checkpoint that another one has replaced: all of it, or what is not `besides`. The other is
    committed, so what cannot be removed fails nothing; `sweep` removes it later.
    """
    try:
        if not besides:
            folder.remove()
            return
        for name in folder.names():
            if name not in besides:
                folder.child(name).remove()
    except OSError as error:
        _log.warning("%s: what was replaced could not be removed: %s", folder.path, error)


def staging_in(parent: Folder, name: str, token: str) -> Staging:
    if isinstance(parent, LocalFolder):
        return LocalStaging(parent, name, token)
    return InsideStaging(parent, name, token)


def discard(staging: Staging) -> None:
    """After an error, which is the one to be raised: what cannot be removed is left to `sweep`."""
    try:
        staging.discard()
    except OSError as error:
        _log.warning("%s: what an interrupted save left could not be removed: %s", staging.folder.path, error)


def sweep(parent: Folder) -> list[str]:
    """Clear what interrupted saves have left, and put back a checkpoint that one was about to replace. Saves that go on
    in other processes are left alone. Gives the names of what it cleared.
    """
    put_back(parent)
    cleared = []
    for name in parent.names():
        if name.startswith(name_of("")):
            cleared += [f"{name}/{inside}" for inside in _sweep_inside(parent.child(name))]
        elif name.startswith(OLD) or (
            name.startswith(STAGING)
            and isinstance(parent, LocalFolder)
            and _is_abandoned(name, partial(_newest_s, Path(parent.path, name)))
        ):
            parent.child(name).remove()
            cleared.append(name)
    if isinstance(parent, ObjectFolder):
        cleared += _sweep_uploads(parent)
    return cleared


def _sweep_inside(checkpoint: Folder) -> Iterator[str]:
    """Data of saves that do not go on, which the manifest does not name; and files that it has replaced."""
    inside = checkpoint.names()
    text = checkpoint.read([MANIFEST]).get(MANIFEST, b"").decode() if MANIFEST in inside else ""
    named = set(_NAMED.findall(text))
    has_replaced = isinstance(checkpoint, LocalFolder) and any(name.startswith(_DATA) for name in named)
    for name in inside:
        if name in named or name == MANIFEST:
            continue
        if name.startswith(STAGING):
            is_left = _is_abandoned(name, partial(checkpoint.modified_s, name))
        elif name.startswith(_DATA):
            is_left = _is_abandoned(name, partial(_newest_object_s, checkpoint.child(name)))
        else:
            # Somebody may have put a file of his own beside ours since.
            is_ours = has_replaced and name.endswith((".pt", ".dcp", ".safetensors"))
            is_left = is_ours and checkpoint.modified_s(name) < checkpoint.modified_s(MANIFEST)
        if is_left:
            checkpoint.child(name).remove()
            yield name


def _sweep_uploads(parent: ObjectFolder) -> Iterator[str]:
    """Uploads that were not ended, of saves that do not go on."""
    for begun_s, file, upload in parent.unfinished():
        data = file.rpartition("/")[0]
        if file.startswith(name_of("")) and _is_abandoned(data, partial(float, begun_s)):
            parent.forget(file, upload)
            yield file


def _is_abandoned(name: str, newest_s: Callable[[], float]) -> bool:
    """Whether the process that the name ends with is gone; of another machine's, whether nothing was written for
    long. newest_s: when it last was, as seconds since the epoch.
    """
    owner = _TOKEN.search(name)
    if owner is not None and owner["host"] == _host():
        return start_time(int(owner["pid"])) != owner["started"]
    return time.time() - newest_s() > _ABANDONED_S


def _newest_s(path: Path) -> float:
    return max((file.stat().st_mtime for file in (path, *path.rglob("*"))), default=0.0)


def _newest_object_s(folder: Folder) -> float:
    return max(map(folder.modified_s, folder.walk()), default=0.0)


def new_token() -> str:
    """Names one save, and the process that makes it: `<random>.<host>.<pid>.<when it began>`. In the name, not in a
    file: a process may be killed between making a folder and writing to it.
    """
    return f"{uuid.uuid4().hex[:12]}.{_host()}.{os.getpid()}.{start_time(os.getpid())}"


def _host() -> str:
    """Eight letters, another eight after a reboot, and in another container: pids mean something else there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        where = f"{boot}{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc, as on macOS
        where = platform.node()
    return f"{zlib.crc32(where.encode()):08x}"


def _exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Exchange two names. False where nothing was done: NFS and macOS cannot, nor can libraries of C without it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    # Whatever the reason of a refusal, the caller's other way meets it too, and says it.
    return int(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)) == 0
