"""Blobs as files of a folder."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..model.refusal import Reason, Refusal
from .blobs import HASH, PIECE, UNFINISHED_S, check_content, missing_blob
from .lock import make_folder


class FolderBlobs:
    """Blobs below a folder, each a file named by its SHA-256.

    Args:
        folder: Is made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unfinished = folder / "unfinished"
        make_folder("storage.folder", folder)
        make_folder("storage.folder", self._unfinished)

    def writer(self) -> FolderBlobWriter:
        return FolderBlobWriter(self, self._unfinished / uuid.uuid4().hex)

    def open(self, sha256: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        try:
            file = self.path(sha256).open("rb")
        except FileNotFoundError:
            raise missing_blob(sha256) from None
        return _pieces(file.fileno(), file, start, end)

    def exists(self, sha256: str) -> bool:
        return self.path(sha256).exists()

    def delete(self, sha256: str) -> None:
        self.path(sha256).unlink(missing_ok=True)

    def presigned(self, sha256: str) -> str | None:
        return None

    def clean_up(self) -> None:
        before = time.time() - UNFINISHED_S
        for left in self._unfinished.iterdir():
            with suppress(FileNotFoundError):  # another server was first
                if left.stat().st_mtime < before:
                    left.unlink()

    def path(self, sha256: str) -> Path:
        """Return the file of a blob. Only a hash ever becomes a path."""
        if not HASH.fullmatch(sha256):
            raise missing_blob(sha256)
        return self._folder / sha256[:2] / sha256[2:]


class FolderBlobWriter:
    """A file on its way in."""

    def __init__(self, blobs: FolderBlobs, path: Path) -> None:
        self._blobs = blobs
        self._path = path
        self._hash = hashlib.sha256()
        self._size = 0
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _no_space(error) from error

    def write(self, piece: bytes) -> None:
        self._hash.update(piece)
        self._size += len(piece)
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise _no_space(error) from error

    def finish(self, sha256: str | None = None, size: int | None = None) -> tuple[str, int]:
        found = self._hash.hexdigest(), self._size
        try:
            check_content(found, sha256, size)
            path = self._blobs.path(found[0])
            if not path.exists():
                os.fsync(self._descriptor)
                path.parent.mkdir(exist_ok=True)
                self._path.replace(path)
                _flush_folder(path.parent)
        except OSError as error:
            raise _no_space(error) from error
        finally:
            self.abort()
        return found

    def abort(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._path.unlink(missing_ok=True)


def _pieces(descriptor: int, file: object, start: int, end: int | None) -> Iterator[bytes]:
    position = start
    with file:  # type: ignore[attr-defined]
        while end is None or position < end:
            piece = os.pread(descriptor, PIECE if end is None else min(PIECE, end - position), position)
            if not piece:
                return
            position += len(piece)
            yield piece


def _flush_folder(folder: Path) -> None:
    """Make a new name in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_space(error: OSError) -> Refusal:
    return Refusal(Reason.UNAVAILABLE, f"blob: the hub cannot write it now ({error.strerror}); try again later")
