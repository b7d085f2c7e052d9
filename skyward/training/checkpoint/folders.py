"""Where checkpoints lie: folders of a file system, or prefixes of an object store by a URL that fsspec knows.

What is written through `create` is durable when it is closed without an error; it is hashed on its way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import xxhash

from ...errors import MissingDependency

__all__ = ["Folder", "HashingFile", "LocalFolder", "ObjectFolder", "digest_of_file", "flush_folder", "folder_at"]

_CHUNK = 8 << 20


class HashingFile:
    """Writes to a file, counts and hashes what passes. The first error is kept, and `check` raises it.

    torch.save's writer cannot have an exception pass through it: it ends the process, or loses the error.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._error: BaseException | None = None
        self.bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._file.write(view)
                self._hash.update(view)
                self.bytes += len(view)
            except BaseException as error:
                self._error = error
        return len(view)

    def flush(self) -> None:
        """For torch.save; `create` flushes at the end."""

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    @property
    def digest(self) -> str:
        return f"xxh3:{self._hash.hexdigest()}"


class Folder(Protocol):
    """Names in it are relative, with `/`. Reading what is not there raises FileNotFoundError."""

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

    def create(self, name: str) -> Any:
        """A context manager that gives a HashingFile. Raises on leaving: what the writing did."""

    def remove(self) -> None:
        """With everything in it; nothing where it does not exist."""

    def modified_s(self, name: str) -> float:
        """When a file was last written, as seconds since the epoch; 0 where the store does not say."""


class LocalFolder:
    """A folder of a file system. It is made when something is written to it."""

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
        return sorted(each.relative_to(self._path).as_posix() for each in self._path.rglob("*") if each.is_file())

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def open(self, name: str) -> BinaryIO:
        return open(self._path / name, "rb")

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        target = self._path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb", buffering=0) as file:
            hashing = HashingFile(cast("BinaryIO", _Whole(file)))
            yield hashing
            hashing.check()
            os.fsync(file.fileno())

    def remove(self) -> None:
        if self._path.is_dir():
            shutil.rmtree(self._path)

    def modified_s(self, name: str) -> float:
        return (self._path / name).stat().st_mtime


class _Whole:
    """An unbuffered file whose write writes everything: the system may take a part of a large piece."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, view: memoryview) -> None:
        while view:
            view = view[self._file.write(view) :]


class ObjectFolder:
    """A prefix in an object store. A file is there when its writer is closed, whole or not at all."""

    def __init__(self, system: Any, protocol: str, path: str) -> None:
        self._system, self._protocol, self._path = system, protocol, path.rstrip("/")

    def __repr__(self) -> str:
        return f"ObjectFolder({self.path!r})"

    @property
    def path(self) -> str:
        return f"{self._protocol}://{self._path}"

    def child(self, name: str) -> ObjectFolder:
        return ObjectFolder(self._system, self._protocol, f"{self._path}/{name}")

    def parent(self) -> tuple[ObjectFolder, str]:
        above, _, name = self._path.rpartition("/")
        return ObjectFolder(self._system, self._protocol, above), name

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({each.rstrip("/").rpartition("/")[2] for each in found} - {""})

    def walk(self) -> list[str]:
        self._system.invalidate_cache()
        root = self._system._strip_protocol(self._path).rstrip("/")
        return sorted(self._system._strip_protocol(each)[len(root) + 1 :] for each in self._system.find(self._path))

    def size(self, name: str) -> int:
        return int(self._system.size(f"{self._path}/{name}"))

    def open(self, name: str) -> BinaryIO:
        return cast("BinaryIO", self._system.open(f"{self._path}/{name}", "rb"))

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        target = f"{self._path}/{name}"
        self._system.makedirs(target.rpartition("/")[0], exist_ok=True)  # stores without folders do nothing
        with self._system.open(target, "wb") as file:
            hashing = HashingFile(file)
            yield hashing
            hashing.check()

    def remove(self) -> None:
        if self._system.exists(self._path):
            self._system.rm(self._path, recursive=True)

    def modified_s(self, name: str) -> float:
        try:
            return float(self._system.modified(f"{self._path}/{name}").timestamp())
        except (NotImplementedError, AttributeError):
            return 0.0


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """Raises: MissingDependency for a URL without fsspec, or without the package that it needs for this protocol."""
    text = os.fspath(path)
    if "://" not in text:
        return LocalFolder(text)
    protocol, _, rest = text.partition("://")
    try:
        import fsspec  # type: ignore[import-untyped]

        system = fsspec.filesystem(protocol)
    except ImportError as error:
        raise MissingDependency(f"{text}: needs fsspec and its package for {protocol}:// ({error})") from error
    if protocol in ("file", "local"):
        return LocalFolder(rest)
    return ObjectFolder(system, protocol, system._strip_protocol(text))


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
