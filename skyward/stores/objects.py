"""Folders in an object store, by a URL that fsspec knows, such as `s3://bucket/run`.

Nothing here relies on a client's cache of a store, because another process may have written since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, BinaryIO, NamedTuple, cast

from ..errors import UsageError
from .hashed_file import HashingFile


class StoredFile(NamedTuple):
    """Size of a file in bytes, and a text that differs when its content does."""

    size: int
    version: str


class ObjectFolder:
    """Prefix in an object store. A file appears when its writer is closed, complete or not at all.

    It never creates buckets. Errors of the store's client, whatever their class, are raised as OSError.
    """

    def __init__(self, system: Any, url: str, path: str) -> None:
        """Create the folder; `path` is the file system's own form of the URL."""
        self._system, self._url, self._path = system, url.rstrip("/"), path.rstrip("/")

    def __repr__(self) -> str:
        return f"ObjectFolder({self.path!r})"

    @property
    def path(self) -> str:
        return self._url

    def child(self, name: str) -> ObjectFolder:
        return ObjectFolder(self._system, f"{self._url}/{name}", f"{self._path}/{name}")

    def parent(self) -> tuple[ObjectFolder, str]:
        url, _, name = self._url.rpartition("/")
        if not name or url.endswith("/"):
            raise UsageError(f"url={self._url!r}: not a folder in a bucket; add a name to it, such as s3://bucket/run")
        return ObjectFolder(self._system, url, self._path.rpartition("/")[0]), name

    def names(self) -> list[str]:
        with self._translating_errors():
            try:
                paths = self._system.ls(self._path, detail=False)
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths} - {""})

    def walk(self) -> list[str]:
        with self._translating_errors():
            root = self._system._strip_protocol(self._path).rstrip("/")
            return sorted(self._system._strip_protocol(path)[len(root) + 1 :] for path in self._system.find(self._path))

    def entries(self) -> dict[str, StoredFile]:
        """Return the size and the version of every file below it."""
        with self._translating_errors():
            root = self._system._strip_protocol(self._path).rstrip("/")
            try:
                found = self._system.find(self._path, detail=True)
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return {}
            return {
                self._system._strip_protocol(path)[len(root) + 1 :]: StoredFile(
                    int(info.get("size") or 0), _version(info)
                )
                for path, info in found.items()
            }

    def fetch(self, name: str, path: str) -> None:
        """Copy a file to a path on the disk."""
        with self._translating_errors():
            self._system.get_file(self._at(name), path)

    def delete(self, name: str) -> None:
        """Delete one file; do nothing if it does not exist."""
        with self._translating_errors(), suppress(FileNotFoundError):
            self._system.rm_file(self._at(name))

    def size(self, name: str) -> int:
        with self._translating_errors():
            return int(self._system.size(self._at(name)))

    def open(self, name: str) -> BinaryIO:
        with self._translating_errors():
            return cast("BinaryIO", self._system.open(self._at(name), "rb"))

    def read(self, names: Collection[str]) -> Mapping[str, bytes]:
        by_path = {self._at(name): name for name in names}
        if not by_path:
            return {}
        contents: dict[str, bytes] = {}
        with self._translating_errors():
            answers = self._system.cat(list(by_path), on_error="return")
            for path, answer in answers.items():
                if isinstance(answer, bytes):
                    contents[by_path[path]] = answer
                elif not isinstance(answer, FileNotFoundError):
                    raise answer
        return contents

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        path = self._at(name)
        with self._translating_errors():
            file = self._opened(path)
        hashing = HashingFile(file)
        try:
            yield hashing
            with self._translating_errors():
                hashing.finish()
                file.close()
        except BaseException:
            # Without this, garbage collection would close the file, and a part of it would look complete.
            self._abandon(file, path)
            raise

    def remove(self) -> None:
        with self._translating_errors(), suppress(FileNotFoundError):  # there is nothing to remove
            self._system.rm(self._path, recursive=True)

    def modified_s(self, name: str) -> float:
        with self._translating_errors():
            try:
                return float(self._system.modified(self._at(name)).timestamp())
            except (NotImplementedError, AttributeError):  # a store that does not tell
                return 0.0

    def unfinished(self) -> list[tuple[float, str, str]]:
        """List multipart uploads below this folder that were started and never finished.

        No listing of files shows them, but the store charges for them. Each entry is the start in seconds since the
        epoch, the file's name, and the id that `forget` takes. The list is empty if the store has no such uploads, or
        does not list them.
        """
        ask = getattr(self._system, "list_multipart_uploads", None)
        if ask is None:
            return []
        bucket, _, prefix = self._path.partition("/")
        uploads = []
        with suppress(OSError), self._translating_errors():  # the credentials may allow writing, but not this listing
            for upload in ask(bucket):
                begun = upload.get("Initiated")
                if upload["Key"].startswith(f"{prefix}/") and isinstance(begun, datetime):
                    name = upload["Key"][len(prefix) + 1 :]
                    uploads.append((begun.timestamp(), name, str(upload["UploadId"])))
        return uploads

    def forget(self, name: str, upload: str) -> None:
        """Abort an upload that `unfinished` has found."""
        bucket, _, prefix = self._path.partition("/")
        with suppress(FileNotFoundError), self._translating_errors():  # it has ended in the meantime
            self._system.abort_mpu(bucket, f"{prefix}/{name}", upload)

    # -----------------------------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        """Return the file's path, and make the client forget what it has cached."""
        self._system.invalidate_cache()
        return f"{self._path}/{name}"

    def _opened(self, path: str) -> Any:
        try:
            return self._system.open(path, "wb")
        except FileNotFoundError:
            # This file system has real folders, and one is missing. `makedirs` is not called up front, because on an
            # object store it would create the bucket.
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._system.open(path, "wb")

    def _abandon(self, file: Any, path: str) -> None:
        with suppress(Exception):  # the error that led here will be raised
            file.discard()
        try:
            file.closed = True
        except AttributeError:  # a file that cannot be marked as closed
            with suppress(Exception):  # the error that led here will be raised
                file.close()
                self._system.rm_file(path)

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        self._system.invalidate_cache()
        try:
            yield
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise OSError(f"{self._url}: no such bucket; create it, or correct the name") from error
            raise
        except PermissionError as error:
            raise PermissionError(
                f"{self._url}: the store refuses access ({error}); check the credentials and their permissions"
            ) from error
        except OSError as error:
            raise OSError(f"{self._url}: {error}") from error
        except Exception as error:
            raise OSError(f"{self._url}: {type(error).__name__}: {error}") from error


def _version(info: Mapping[str, Any]) -> str:
    """Return the store's own mark of a version. Each client of fsspec has other names for it."""
    for key in ("ETag", "etag", "generation", "md5Hash", "content_settings", "LastModified", "mtime", "created"):
        if info.get(key):
            return str(info[key])
    return str(info.get("size"))


def _code(error: BaseException) -> str:
    """Return S3's code of the failure. The error of its client is the cause of the one from fsspec."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""
