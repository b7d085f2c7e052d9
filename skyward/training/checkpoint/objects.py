"""Checkpoints in an object store, by a URL that fsspec knows: `s3://bucket/run`.

Nothing here relies on what a client remembers of a store: another process may have written since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, BinaryIO, cast

from ...errors import UsageError
from .hashed_file import HashingFile

__all__ = ["ObjectFolder"]


class ObjectFolder:
    """A prefix in an object store. A file is there when its writer is closed, whole or not at all.

    Buckets are not made. What the store's client raises, which may be of any class, comes as an OSError.
    """

    def __init__(self, system: Any, url: str, path: str) -> None:
        """path: what the system calls the URL."""
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
            raise UsageError(f"{self._url}: is no folder in a bucket; add a name to it")
        return ObjectFolder(self._system, url, self._path.rpartition("/")[0]), name

    def names(self) -> list[str]:
        with self._asking():
            try:
                found = self._system.ls(self._path, detail=False)
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found} - {""})

    def walk(self) -> list[str]:
        with self._asking():
            root = self._system._strip_protocol(self._path).rstrip("/")
            return sorted(self._system._strip_protocol(path)[len(root) + 1 :] for path in self._system.find(self._path))

    def size(self, name: str) -> int:
        with self._asking():
            return int(self._system.size(self._at(name)))

    def open(self, name: str) -> BinaryIO:
        with self._asking():
            return cast("BinaryIO", self._system.open(self._at(name), "rb"))

    def read(self, names: Collection[str]) -> Mapping[str, bytes]:
        by_path = {self._at(name): name for name in names}
        if not by_path:
            return {}
        found: dict[str, bytes] = {}
        with self._asking():
            answers = self._system.cat(list(by_path), on_error="return")
            for path, answer in answers.items():
                if isinstance(answer, bytes):
                    found[by_path[path]] = answer
                elif not isinstance(answer, FileNotFoundError):
                    raise answer
        return found

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        path = self._at(name)
        with self._asking():
            file = self._opened(path)
        hashing = HashingFile(file)
        try:
            yield hashing
            with self._asking():
                hashing.finish()
                file.close()
        except BaseException:
            # Left alone it would be closed when it is collected, and so become a file that looks whole.
            self._abandon(file, path)
            raise

    def remove(self) -> None:
        with self._asking(), suppress(FileNotFoundError):  # nothing to remove
            self._system.rm(self._path, recursive=True)

    def modified_s(self, name: str) -> float:
        with self._asking():
            try:
                return float(self._system.modified(self._at(name)).timestamp())
            except (NotImplementedError, AttributeError):  # a store that does not say
                return 0.0

    def unfinished(self) -> list[tuple[float, str, str]]:
        """Uploads in parts of files below it that were begun and not ended: when, as seconds since the epoch, the
        file's name, and what `forget` takes. No listing shows them, and they are paid for. None where the store has no
        such thing, or does not say.
        """
        ask = getattr(self._system, "list_multipart_uploads", None)
        if ask is None:
            return []
        bucket, _, prefix = self._path.partition("/")
        found = []
        with suppress(OSError), self._asking():  # it may be that we may write, and not ask this
            for upload in ask(bucket):
                begun = upload.get("Initiated")
                if upload["Key"].startswith(f"{prefix}/") and isinstance(begun, datetime):
                    name = upload["Key"][len(prefix) + 1 :]
                    found.append((begun.timestamp(), name, str(upload["UploadId"])))
        return found

    def forget(self, name: str, upload: str) -> None:
        """Ends what `unfinished` has found."""
        bucket, _, prefix = self._path.partition("/")
        with suppress(FileNotFoundError), self._asking():  # it has ended meanwhile
            self._system.abort_mpu(bucket, f"{prefix}/{name}", upload)

    # -----------------------------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        """The file's path, of which the client is to forget what it has seen."""
        self._system.invalidate_cache()
        return f"{self._path}/{name}"

    def _opened(self, path: str) -> Any:
        try:
            return self._system.open(path, "wb")
        except FileNotFoundError:
            # It has folders after all, and this one is missing. Not asked for before: makedirs makes buckets, too.
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._system.open(path, "wb")

    def _abandon(self, file: Any, path: str) -> None:
        with suppress(Exception):  # it is abandoned because something else went wrong, which is said
            file.discard()
        try:
            file.closed = True
        except AttributeError:  # this kind of file cannot be marked as closed
            with suppress(Exception):  # the error that led here is raised
                file.close()
                self._system.rm_file(path)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self._system.invalidate_cache()
        try:
            yield
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise OSError(f"{self._url}: there is no such bucket; make it, or mend the name") from error
            raise
        except PermissionError as error:
            raise PermissionError(
                f"{self._url}: the store refuses it ({error}); look at the credentials and what they are allowed"
            ) from error
        except OSError as error:
            raise OSError(f"{self._url}: {error}") from error
        except Exception as error:
            raise OSError(f"{self._url}: {type(error).__name__}: {error}") from error


def _code(error: BaseException) -> str:
    """How S3 calls what was refused; the error of its client is the cause of ours."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""
