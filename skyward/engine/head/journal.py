"""Journal of a head: a file from which a new process goes on when this one was killed.

    | length u32 | checksum u32 | mark u8 | content |

A record is complete or cut off when the file is read: a process may die, or the disk fill up, within a write. The
mark of a record changes in place. So it needs no room on a full disk, and records that are over take no further ones.

There is no fsync. The kernel keeps what a killed process has written. If the machine stops, the calls' node stops too,
and nothing starts its head again.

Blobs have files of their own beside the journal, which live as long as the objects that stand for them here.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import struct
import weakref
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from ...wire.blobs import Blob

_HEAD = struct.Struct("<IIB")
_MARK_AT = 8
_NAME = "journal"
_BLOBS = "blobs"
_LEAST_BYTES = 1 << 20
"""Size in bytes from which the journal is rewritten once half of it may be over."""
_PIECE = 1 << 20

LIVE = 0
BEGUN = 1
"""Mark of a call that was sent to a node."""
OVER = 2
"""Mark of a record that nobody needs."""
TORN = 3
"""Mark of a call that was sent to a node, and of which a later frame found no room."""


class JournalRecord(NamedTuple):
    """Record of a journal. `at` is its place in the file."""

    at: int
    mark: int
    content: bytes


class BlobName(NamedTuple):
    """Name of a blob in a journal."""

    file: int
    digest: bytes
    size: int


class HeadJournal:
    """Journal in a folder that exists. One thread at a time may use it.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _NAME)
        self._blobs = os.path.join(folder, _BLOBS)
        self._fd = _open(self._path)
        os.makedirs(self._blobs, mode=0o700, exist_ok=True)
        self._numbers = itertools.count()
        self._files: weakref.WeakKeyDictionary[Blob, int] = weakref.WeakKeyDictionary()
        self._due_at = _LEAST_BYTES
        self.size = os.fstat(self._fd).st_size

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:  # it could be opened
            os.close(self._fd)

    def read(self) -> list[JournalRecord]:
        """Return all records in order, also those that are over, and cut off an incomplete last one."""
        records: list[JournalRecord] = []
        at = 0
        with open(self._path, "rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, checksum, mark = _HEAD.unpack(head)
                if at + _HEAD.size + length > self.size:
                    break
                content = file.read(length)
                if zlib.crc32(content) != checksum:
                    break
                records.append(JournalRecord(at, mark, content))
                at += _HEAD.size + length
        os.ftruncate(self._fd, at)
        self.size = at
        return records

    def append(self, content: bytes) -> int:
        """Write a record, and return its place. Raises OSError, and then nothing of it is left."""
        at, record = self.size, _HEAD.pack(len(content), zlib.crc32(content), LIVE) + content
        try:
            _write(self._fd, record, at)
        except OSError:
            os.ftruncate(self._fd, at)
            raise
        self.size += len(record)
        return at

    def mark(self, at: int, mark: int) -> None:
        """Change the mark of a record."""
        os.pwrite(self._fd, bytes((mark,)), at + _MARK_AT)

    @property
    def is_due(self) -> bool:
        """Return whether the journal has grown so much that it should be rewritten."""
        return self.size >= self._due_at

    def rewrite(self, places: Iterable[int]) -> dict[int, int]:
        """Keep only the records at these places, in this order. Return their new places by the old ones.

        Raises:
            OSError: There is no room for that. The journal stays as it was.
        """
        self._due_at = 2 * max(self.size, _LEAST_BYTES)  # if it fails, not again at once
        moved: dict[int, int] = {}
        path, size = f"{self._path}.new", 0
        fd = _open(path, os.O_TRUNC)
        try:
            for at in places:
                length, _, _ = _HEAD.unpack(os.pread(self._fd, _HEAD.size, at))
                _write(fd, os.pread(self._fd, _HEAD.size + length, at), size)
                moved[at] = size
                size += _HEAD.size + length
            os.replace(path, self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self.size = fd, size
        self._due_at = max(2 * size, _LEAST_BYTES)
        return moved

    # Blobs ------------------------------------------------------------------------------------------------------------

    def keep(self, blob: Blob) -> BlobName:
        """Write a blob to a file, if it has none, and return its name. Raises OSError."""
        number = self._files.get(blob)
        if number is None:
            number = next(self._numbers)
            path = self._path_of(number)
            try:
                _copy(blob, path)
            except OSError:
                _remove(path)
                raise
            self._note(blob, number)
        return BlobName(number, blob.digest, blob.size)

    def load(self, name: BlobName) -> Blob:
        """Return a blob of an earlier process. Raises OSError."""
        blob = Blob(name.digest, name.size, os.open(self._path_of(name.file), os.O_RDONLY | os.O_CLOEXEC))
        self._note(blob, name.file)
        return blob

    def sweep(self) -> None:
        """Remove the files of blobs that nobody has loaded, and let new ones have other names."""
        known = set(self._files.values())
        there = {int(name) for name in os.listdir(self._blobs)}
        for number in there - known:
            _remove(self._path_of(number))
        self._numbers = itertools.count(max(there, default=-1) + 1)

    def _note(self, blob: Blob, number: int) -> None:
        self._files[blob] = number
        weakref.finalize(blob, _remove, self._path_of(number)).atexit = False

    def _path_of(self, number: int) -> str:
        return os.path.join(self._blobs, str(number))


def _open(path: str, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)


def _write(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of the data. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, at = view[written:], at + written


def _copy(blob: Blob, path: str) -> None:
    fd = _open(path, os.O_EXCL)
    try:
        loaded = blob.in_memory()
        if loaded is not None:
            _write(fd, loaded, 0)
            return
        source = blob.open()
        for at in range(0, blob.size, _PIECE):
            _write(fd, os.pread(source, _PIECE, at), at)
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # the folder was removed
        os.unlink(path)
