"""Where checkpoints lie: folders of a file system, or prefixes of an object store by a URL that fsspec knows.

What is written through `create` is durable when it is closed without an error; it is hashed on its way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import xxhash

from ...errors import MissingDependency, UsageError
from .hashed_file import HashingFile

__all__ = ["Folder", "LocalFolder", "digest_of_file", "flush_folder", "folder_at"]

_CHUNK = 8 << 20
_SENT = 16 << 20
_EXTRAS = {"s3": "skyward[s3]", "s3a": "skyward[s3]", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""What to install for a protocol."""


class Folder(Protocol):
    """Names in it are relative, with `/`. Reading what is not there raises FileNotFoundError; whatever else a disk or
    store refuses is another OSError.
    """

    @property
    def path(self) -> str: ...

    def child(self, name: str) -> Folder: ...

    def parent(self) -> tuple[Folder, str]:
        """The folder that this one is in, and its name there."""

    def names(self) -> list[str]:
        """Files and folders directly in it, sorted; none where it does not exist."""

    def walk(self) -> list[str]:
        """Every file below it, sorted."""

    def size(self, name: str) -> int: ...

    def open(self, name: str) -> BinaryIO: ...

    def read(self, names: Collection[str]) -> Mapping[str, bytes]:
        """The whole of each file, in memory; of several at once where that is quicker. Those not there are left out."""

    def create(self, name: str) -> AbstractContextManager[HashingFile]:
        """For the body to write to. Leaving it makes the file durable. Raises on leaving: what the writing did."""

    def remove(self) -> None:
        """With everything in it; nothing where it does not exist."""

    def modified_s(self, name: str) -> float:
        """When a file was last written, as seconds since the epoch; 0 where the store does not say."""


class LocalFolder:
    """A folder of a file system, or a file to be removed. It is made when something is written to it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __repr__(self) -> str:
        return f"LocalFolder({self.path!r})"

    @property
    def path(self) -> str:
        return str(self._path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name)

    def parent(self) -> tuple[LocalFolder, str]:
        whole = Path(os.path.abspath(self._path))
        return LocalFolder(self._path.parent if self._path.name else whole.parent), whole.name

    def names(self) -> list[str]:
        return sorted(os.listdir(self._path)) if self._path.is_dir() else []

    def walk(self) -> list[str]:
        return sorted(file.relative_to(self._path).as_posix() for file in self._path.rglob("*") if file.is_file())

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def open(self, name: str) -> BinaryIO:
        return open(self._path / name, "rb")

    def read(self, names: Collection[str]) -> Mapping[str, bytes]:
        found = {}
        for name in names:
            try:
                found[name] = (self._path / name).read_bytes()
            except (FileNotFoundError, NotADirectoryError):  # what is not there is left out
                continue
        return found

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        target = self._path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb", buffering=0) as file:
            hashing = HashingFile(_OnItsWay(file))
            yield hashing
            hashing.finish()
            os.fsync(file.fileno())

    def remove(self) -> None:
        if self._path.is_dir():
            shutil.rmtree(self._path)
        else:
            self._path.unlink(missing_ok=True)

    def modified_s(self, name: str) -> float:
        return (self._path / name).stat().st_mtime


class _OnItsWay:
    """An unbuffered file whose write writes everything (the system may take a part of a large piece), and whose
    contents go to the disk while more is written, not all of them in the fsync at the end.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._written = self._sent = 0

    def write(self, view: memoryview) -> None:
        while view:
            count = self._file.write(view)
            self._written += count
            view = view[count:]
        if self._written - self._sent >= _SENT and hasattr(os, "posix_fadvise"):
            # Begins to write the pages, which are dirty, and so keeps them. Of 257 MiB the fsync took 60 ms less.
            with suppress(OSError):  # a system that does not know this writes them later
                os.posix_fadvise(self._file.fileno(), self._sent, self._written - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = self._written


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """Raises: MissingDependency for a URL without fsspec, or without the package that it needs for this protocol;
    UsageError for a protocol that it does not know.
    """
    text = os.fspath(path)
    if "://" not in text:
        return LocalFolder(text)
    protocol, _, rest = text.partition("://")
    if protocol in ("file", "local"):
        return LocalFolder(rest)
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(text)
    except ImportError as error:
        what = _EXTRAS.get(protocol, "fsspec")
        raise MissingDependency(f"{text}: pip install '{what}' ({error})", name=error.name or what) from error
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from error
    from .objects import ObjectFolder

    return ObjectFolder(system, text, str(path))


def digest_of_file(folder: Folder, name: str) -> str:
    """As `HashingFile.digest`, read back."""
    found = xxhash.xxh3_128()
    with folder.open(name) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return f"xxh3:{found.hexdigest()}"


def flush_folder(path: str | os.PathLike[str]) -> None:
    """Makes names in a local folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
