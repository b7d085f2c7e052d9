"""From files that ranks wrote to a checkpoint that is there: one step, after which it is whole, or never was.

On a file system the files are staged in `.tmp-checkpoint-<id>-<token>` beside their place, and the folder is renamed.
In an object store, which cannot rename, they lie in `checkpoint-<id>/data-<token>/`, and the manifest, put last by one
request, is the commit. A checkpoint that is replaced is there until the new one is.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import time
import uuid
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from .folders import Folder, LocalFolder, flush_folder
from .layout import OLD, STAGING, name_of
from .manifest import MANIFEST
from .objects import ObjectFolder

__all__ = ["LocalStaging", "ObjectStaging", "Staging", "discard", "new_token", "staging_in", "sweep"]

_log = logging.getLogger(__name__)

_TOKEN = re.compile(r"(?P<host>[0-9a-f]{8})\.(?P<pid>\d+)\.(?P<started>\d*)$")
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

    def commit(self, manifest: bytes) -> str:
        """Rank 0's, when all ranks have written and flushed their files. Gives the checkpoint's path."""

    def discard(self) -> None:
        """Rank 0's, when no rank writes any longer."""


class LocalStaging:
    def __init__(self, parent: LocalFolder, name: str, token: str) -> None:
        self._parent, self._name, self._token = parent, name, token
        self.folder: Folder = parent.child(f"{STAGING}{name}-{token}")
        self.prefix = ""

    def begin(self) -> None:
        Path(self.folder.path).mkdir(parents=True)

    def commit(self, manifest: bytes) -> str:
        with self.folder.create(MANIFEST) as file:
            file.write(manifest)
        staged, final = Path(self.folder.path), Path(self._parent.path, self._name)
        # Once for all names, those of other ranks' files too: every flush costs a commit of the file system's journal.
        for folder in [staged, *(below for below in staged.rglob("*") if below.is_dir())]:
            flush_folder(folder)
        replaced = Path(self._parent.path, f"{OLD}{self._name}-{self._token}")
        if final.exists():
            final.rename(replaced)  # `sweep` renames it back if we die here
        try:
            staged.rename(final)
        except OSError:
            if replaced.exists():
                replaced.rename(final)
            raise
        flush_folder(self._parent.path)
        _remove_replaced(LocalFolder(replaced))
        return str(final)

    def discard(self) -> None:
        self.folder.remove()


class ObjectStaging:
    def __init__(self, parent: Folder, name: str, token: str) -> None:
        self._final = parent.child(name)
        self._may_be_committed = False
        self.prefix = f"data-{token}/"
        self.folder: Folder = self._final.child(f"data-{token}")

    def begin(self) -> None:
        self._final.names()  # a store that cannot be reached says so before anything is sent

    def commit(self, manifest: bytes) -> str:
        self._may_be_committed = True
        try:
            with self._final.create(MANIFEST) as file:
                file.write(manifest)
        except OSError:
            # It may be that only the answer was lost.
            if self._final.read([MANIFEST]).get(MANIFEST) != manifest:
                raise
        _remove_replaced(self._final, besides=self.prefix.rstrip("/"))
        return self._final.path

    def discard(self) -> None:
        """What a manifest names, or may come to name, stays: `sweep` clears it when nobody can write any more."""
        if not self._may_be_committed:
            self.folder.remove()


def _remove_replaced(folder: Folder, *, besides: str = "") -> None:
    """The data of a checkpoint that another one has replaced: all of it, or what is not `besides`. The other is
    committed, so what cannot be removed fails nothing; `sweep` removes it later.
    """
    try:
        if not besides:
            folder.remove()
            return
        for name in folder.names():
            if name.startswith("data-") and name != besides:
                folder.child(name).remove()
    except OSError as error:
        _log.warning("%s: what was replaced could not be removed: %s", folder.path, error)


def staging_in(parent: Folder, name: str, token: str) -> Staging:
    if isinstance(parent, LocalFolder):
        return LocalStaging(parent, name, token)
    return ObjectStaging(parent, name, token)


def discard(staging: Staging) -> None:
    """After an error, which is the one to be raised: what cannot be removed is left to `sweep`."""
    try:
        staging.discard()
    except OSError as error:
        _log.warning("%s: what an interrupted save left could not be removed: %s", staging.folder.path, error)


def sweep(parent: Folder) -> list[str]:
    """Clears what interrupted saves have left; puts back a checkpoint that one was about to replace. Saves that go on
    in other processes are left alone. Gives the names of what it cleared.
    """
    if isinstance(parent, ObjectFolder):
        return _sweep_objects(parent)
    cleared = []
    for name in parent.names():
        path = Path(parent.path, name)
        if name.startswith(OLD):
            final = Path(parent.path, name[len(OLD) :].rpartition("-")[0])
            if final.exists():
                LocalFolder(path).remove()
                cleared.append(name)
            else:
                path.rename(final)
        elif name.startswith(STAGING) and _is_abandoned(name, partial(_newest_s, path)):
            LocalFolder(path).remove()
            cleared.append(name)
    return cleared


def _sweep_objects(parent: ObjectFolder) -> list[str]:
    """Data that no manifest names, and uploads that were not ended, of saves that do not go on."""
    cleared = []
    for name in parent.names():
        checkpoint = parent.child(name)
        inside = checkpoint.names() if name.startswith(name_of("")) else []
        named = checkpoint.read([MANIFEST]).get(MANIFEST, b"").decode() if MANIFEST in inside else ""
        for data in inside:
            if not data.startswith("data-") or f'"{data}/' in named:
                continue
            folder = checkpoint.child(data)
            if _is_abandoned(data, partial(_newest_object_s, folder)):
                folder.remove()
                cleared.append(f"{name}/{data}")
    for begun_s, file, upload in parent.unfinished():
        data = file.rpartition("/")[0]
        if file.startswith(name_of("")) and _is_abandoned(data, partial(float, begun_s)):
            parent.forget(file, upload)
            cleared.append(file)
    return cleared


def _is_abandoned(name: str, newest_s: Callable[[], float]) -> bool:
    """Whether the process that the name ends with is gone; of another machine's, whether nothing was written for
    long. newest_s: when it last was, as seconds since the epoch.
    """
    owner = _TOKEN.search(name)
    if owner is not None and owner["host"] == _host():
        return _started(int(owner["pid"])) != owner["started"]
    return time.time() - newest_s() > _ABANDONED_S


def _newest_s(path: Path) -> float:
    return max((each.stat().st_mtime for each in (path, *path.rglob("*"))), default=0.0)


def _newest_object_s(folder: Folder) -> float:
    return max(map(folder.modified_s, folder.walk()), default=0.0)


def new_token() -> str:
    """Names one save, and the process that makes it: `<random>.<host>.<pid>.<when it began>`. In the name, not in a
    file: a process may be killed between making a folder and writing to it.
    """
    return f"{uuid.uuid4().hex[:12]}.{_host()}.{os.getpid()}.{_started(os.getpid())}"


def _host() -> str:
    """Eight letters, another eight after a reboot, and in another container: pids mean something else there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        where = f"{boot}{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        where = platform.node()
    return f"{zlib.crc32(where.encode()):08x}"


def _started(pid: int) -> str:
    """When a process began, in ticks since boot: pids come again. Empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
