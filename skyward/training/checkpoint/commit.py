"""From files that ranks wrote to a checkpoint that is there: one step, after which it is whole, or never was.

On a file system the files are staged in `.tmp-checkpoint-<id>-<token>` beside their place, and the folder is renamed.
In an object store, which cannot rename, they lie in `checkpoint-<id>/data-<token>/`, and the manifest, put last by one
request, is the commit. A checkpoint that is replaced is there until the new one is.
"""

from __future__ import annotations

import os
import platform
import re
import time
import uuid
import zlib
from pathlib import Path
from typing import Protocol

from .folders import Folder, LocalFolder, flush_folder
from .layout import OLD, STAGING
from .manifest import MANIFEST

__all__ = ["LocalStaging", "ObjectStaging", "Staging", "new_token", "staging_in", "sweep"]

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
        LocalFolder(replaced).remove()
        return str(final)

    def discard(self) -> None:
        self.folder.remove()


class ObjectStaging:
    def __init__(self, parent: Folder, name: str, token: str) -> None:
        self._final = parent.child(name)
        self.prefix = f"data-{token}/"
        self.folder: Folder = self._final.child(f"data-{token}")

    def begin(self) -> None:
        pass  # there are no folders to be made

    def commit(self, manifest: bytes) -> str:
        with self._final.create(MANIFEST) as file:
            file.write(manifest)
        for name in self._final.names():
            if name.startswith("data-") and f"{name}/" != self.prefix:
                self._final.child(name).remove()  # of the checkpoint that this one replaces
        return self._final.path

    def discard(self) -> None:
        self.folder.remove()


def staging_in(parent: Folder, name: str, token: str) -> Staging:
    if isinstance(parent, LocalFolder):
        return LocalStaging(parent, name, token)
    return ObjectStaging(parent, name, token)


def sweep(parent: Folder) -> list[str]:
    """Clears what interrupted saves have left; puts back a checkpoint that one was about to replace. Saves that go on
    in other processes are left alone. Gives the names of what it cleared.
    """
    if not isinstance(parent, LocalFolder):
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
        elif name.startswith(STAGING) and _is_abandoned(path):
            LocalFolder(path).remove()
            cleared.append(name)
    return cleared


def _sweep_objects(parent: Folder) -> list[str]:
    """Data that no manifest names, and that nothing was added to for long: other clients may be writing."""
    cleared = []
    for name in parent.names():
        checkpoint = parent.child(name)
        inside = checkpoint.names() if name.startswith("checkpoint-") else []
        named = ""
        if MANIFEST in inside:
            with checkpoint.open(MANIFEST) as file:
                named = file.read().decode()
        for data in inside:
            if not data.startswith("data-") or f'"{data}/' in named:
                continue
            files = checkpoint.child(data).walk()
            newest = max((checkpoint.child(data).modified_s(each) for each in files), default=0.0)
            if time.time() - newest > _ABANDONED_S:
                checkpoint.child(data).remove()
                cleared.append(f"{name}/{data}")
    return cleared


def _is_abandoned(path: Path) -> bool:
    owner = _TOKEN.search(path.name)
    if owner is not None and owner["host"] == _host():
        return _started(int(owner["pid"])) != owner["started"]
    newest = max((each.stat().st_mtime for each in (path, *path.rglob("*"))), default=0.0)
    return time.time() - newest > _ABANDONED_S


def new_token() -> str:
    """Names one save, and the process that makes it: `<random>.<host>.<pid>.<when it began>`. In the name, not in a
    file: a process may be killed between making a folder and writing to it.
    """
    return f"{uuid.uuid4().hex[:12]}.{_host()}.{os.getpid()}.{_started(os.getpid())}"


def _host() -> str:
    """Eight letters, another eight after a reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
    except OSError:
        return f"{zlib.crc32(platform.node().encode()):08x}"


def _started(pid: int) -> str:
    """When a process began, in ticks since boot: pids come again. Empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
