"""Commit of a checkpoint: one atomic step turns the files that ranks wrote into a complete checkpoint.

On a file system the files are staged in `.tmp-checkpoint-<id>-<token>` beside their final place, and the folder is
renamed. Object stores cannot rename. There the files are written to `checkpoint-<id>/data-<token>/`, and the manifest,
put last by a single request, is the commit. The same is done on a file system that cannot exchange two names (NFS) when
a checkpoint is replaced. At every moment either the old checkpoint is there or the new one.
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
from ...stores.folders import Folder, LocalFolder, flush_folder
from ...stores.objects import ObjectFolder
from .layout import OLD, STAGING, name_of, put_back
from .manifest import MANIFEST, Manifest

_log = logging.getLogger(__name__)

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Source: linux/fcntl.h, linux/fs.h."""

_TOKEN = re.compile(r"(?P<host>[0-9a-f]{8})\.(?P<pid>\d+)\.(?P<started>\d*)$")
_DATA = "data-"
_NAMED = re.compile(r'"path": "([^"/]+)')
"""First part of the paths in a manifest. A pattern and not JSON, because the manifest may be damaged."""
_ABANDONED_S = 3600.0
"""Age at which staging of another machine counts as abandoned: its processes cannot be checked from here.

A save that takes longer keeps writing, so its newest file is younger.
"""


def no_fence() -> None:
    """Permit a commit."""


class Staging(Protocol):
    """Files of one save until their commit. All ranks create it from the same three values."""

    @property
    def folder(self) -> Folder:
        """Folder to write to. Until the commit, paths in the manifest are relative to it."""

    @property
    def prefix(self) -> str:
        """Text in front of each file's name in the manifest."""

    def begin(self) -> None:
        """Prepare for the ranks' files. Rank 0 calls it before the others write."""

    def commit(self, manifest: Manifest, permit: Callable[[], None] = no_fence) -> str:
        """Commit, and return the checkpoint's path. Rank 0 calls it when all ranks have flushed their files.

        `permit` raises if this attempt must not commit. It is called right before the step that cannot be undone.
        """

    def discard(self) -> None:
        """Remove the files. Rank 0 calls it when no rank writes any longer."""


class LocalStaging:
    """Staging beside the final place, renamed to it.

    An existing checkpoint exchanges names with the staging in the same step. If the file system cannot do that, the
    files are moved into the checkpoint, as `InsideStaging` does it.
    """

    def __init__(self, parent: LocalFolder, name: str, token: str) -> None:
        self._parent, self._name, self._token = parent, name, token
        self._inside: InsideStaging | None = None
        self.folder: Folder = parent.child(f"{STAGING}{name}-{token}")
        self.prefix = ""

    def begin(self) -> None:
        Path(self.folder.path).mkdir(parents=True)

    def commit(self, manifest: Manifest, permit: Callable[[], None] = no_fence) -> str:
        # The manifest is written last, so a folder with a manifest has all its files. It is still in the staging: no
        # reader sees it before the rename.
        with self.folder.create(MANIFEST) as file:
            file.write(manifest.to_json())
        staged, final = Path(self.folder.path), Path(self._parent.path, self._name)
        # One flush per folder, after all files are written: each flush costs a commit of the file system's journal. It
        # makes the names of other ranks' files durable too.
        for folder in [staged, *(below for below in staged.rglob("*") if below.is_dir())]:
            flush_folder(folder)
        # Nothing between here and the rename may write to the staging: it would come back after a newer attempt has
        # taken it away.
        permit()
        if not final.exists():
            staged.rename(final)
        elif not _exchange(staged, final):
            return self._commit_inside(manifest, permit)
        # Only after this flush does the commit survive a power failure, so it is reported no earlier.
        flush_folder(self._parent.path)
        # After an exchange the staging's name belongs to the old checkpoint. Otherwise nothing is there.
        _remove_replaced(self.folder)
        return str(final)

    def discard(self) -> None:
        self.folder.remove()
        if self._inside is not None:
            self._inside.discard()

    def _commit_inside(self, manifest: Manifest, permit: Callable[[], None]) -> str:
        inside = self._inside = InsideStaging(self._parent, self._name, self._token)
        staged = Path(self.folder.path)
        # Without its manifest, the staging becomes plain data inside the old checkpoint. That one stays valid until
        # `inside.commit` replaces its manifest.
        (staged / MANIFEST).unlink()
        staged.rename(inside.folder.path)
        files = tuple(replace(file, path=f"{inside.prefix}{file.path}") for file in manifest.files)
        return inside.commit(replace(manifest, files=files), permit)


class InsideStaging:
    """Staging in `data-<token>/` of the checkpoint itself. It takes effect when the manifest names it."""

    def __init__(self, parent: Folder, name: str, token: str) -> None:
        self._final = parent.child(name)
        self._new_manifest = f"{STAGING}manifest-{token}" if isinstance(parent, LocalFolder) else MANIFEST
        self._may_be_committed = False
        self.prefix = f"{_DATA}{token}/"
        self.folder: Folder = self._final.child(f"{_DATA}{token}")

    def begin(self) -> None:
        self._final.names()  # an unreachable store fails here, before anything is sent

    def commit(self, manifest: Manifest, permit: Callable[[], None] = no_fence) -> str:
        text = manifest.to_json()
        permit()
        self._may_be_committed = True
        try:
            self._put(text)
        except OSError:
            # The request may have succeeded, and only its answer was lost. Read back before calling it a failure.
            if self._final.read([MANIFEST]).get(MANIFEST) != text:
                # A local error is definite. A store may still apply a request that it has received, so the data stays.
                if isinstance(self._final, LocalFolder):
                    self._may_be_committed = False
                    self._final.child(self._new_manifest).remove()
                raise
        _remove_replaced(self._final, besides=(MANIFEST, self.prefix.rstrip("/")))
        return self._final.path

    def _put(self, manifest: bytes) -> None:
        """Write the manifest, or replace the one that is there in a single step."""
        with self._final.create(self._new_manifest) as file:
            file.write(manifest)
        if self._new_manifest != MANIFEST:
            Path(self._final.path, self._new_manifest).replace(Path(self._final.path, MANIFEST))
            flush_folder(self._final.path)

    def discard(self) -> None:
        """Remove the data, unless a manifest names it or may still come to name it.

        `sweep` removes such data once no process can write the manifest.
        """
        if not self._may_be_committed:
            self.folder.remove()


def _remove_replaced(folder: Folder, *, besides: tuple[str, ...] = ()) -> None:
    """Remove the data of a replaced checkpoint: all of it, or the names that are not in `besides`.

    The new checkpoint is committed, so a failure here must not fail the save; `sweep` removes the rest later.
    """
    try:
        if not besides:
            folder.remove()
            return
        for name in folder.names():
            if name not in besides:
                folder.child(name).remove()
    except OSError as error:
        _log.warning("%s: could not remove a replaced checkpoint's files: %s", folder.path, error)


def staging_in(parent: Folder, name: str, token: str) -> Staging:
    """Return the kind of staging that fits the folder."""
    if isinstance(parent, LocalFolder):
        return LocalStaging(parent, name, token)
    return InsideStaging(parent, name, token)


def discard(staging: Staging) -> None:
    """Discard after an error. That error will be raised, so files that cannot be removed are left to `sweep`."""
    try:
        staging.discard()
    except OSError as error:
        _log.warning("%s: could not remove the files of an interrupted save: %s", staging.folder.path, error)


def sweep(parent: Folder) -> list[str]:
    """Remove the remains of interrupted saves, and put back a checkpoint that one was about to replace.

    Running saves of other processes are left alone.

    Returns:
        The names that it removed.
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
    """Remove data of interrupted saves that the manifest does not name, and files that it has replaced."""
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
            # The user may have put files into the folder since. Only known kinds that are older than the manifest go.
            is_ours = has_replaced and name.endswith((".pt", ".dcp", ".safetensors"))
            is_left = is_ours and checkpoint.modified_s(name) < checkpoint.modified_s(MANIFEST)
        if is_left:
            checkpoint.child(name).remove()
            yield name


def _sweep_uploads(parent: ObjectFolder) -> Iterator[str]:
    """Abort unfinished multipart uploads of saves that no longer run."""
    for begun_s, file, upload in parent.unfinished():
        data = file.rpartition("/")[0]
        if file.startswith(name_of("")) and _is_abandoned(data, partial(float, begun_s)):
            parent.forget(file, upload)
            yield file


def _is_abandoned(name: str, newest_s: Callable[[], float]) -> bool:
    """Return whether the save that owns `name` has ended.

    On this machine its process decides; on another one, whether nothing was written for long. `newest_s` returns when
    the last write was, in seconds since the epoch.
    """
    owner = _TOKEN.search(name)
    if owner is not None and owner["host"] == _host():
        return start_time(int(owner["pid"])) != owner["started"]
    return time.time() - newest_s() > _ABANDONED_S


def _newest_s(path: Path) -> float:
    return max((file.stat().st_mtime for file in (path, *path.rglob("*"))), default=0.0)


def _newest_object_s(folder: Folder) -> float:
    return max(map(folder.modified_s, folder.walk()), default=0.0)


def new_token(writer: str = "") -> str:
    """Return a name for one save and the process that makes it: `<random>[.<writer>].<host>.<pid>.<start time>`.

    The owner is in the name and not in a file, because a process can be killed between making a folder and writing to
    it.
    """
    tag = f".{writer}" if writer else ""
    return f"{uuid.uuid4().hex[:12]}{tag}.{_host()}.{os.getpid()}.{start_time(os.getpid())}"


def _host() -> str:
    """Return eight letters for this machine, boot and container: in another one, the same pid is another process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        where = f"{boot}{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc, as on macOS
        where = platform.node()
    return f"{zlib.crc32(where.encode()):08x}"


def _exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Exchange two names in one step.

    Returns:
        False if nothing happened: NFS and macOS cannot do it, nor can C libraries without `renameat2`.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    # The reason of a failure is ignored: if it is not a lack of support, the caller's other way fails with it too.
    return int(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)) == 0
