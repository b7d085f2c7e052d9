"""Deltas on their way to a server. One whose connection breaks goes on where it stopped.

All methods run in the event loop of the server, so no request sees another one half done.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

from .rounds import UpdateKey


@dataclass(kw_only=True, eq=False)
class Upload:
    """One delta: the bytes that have come, by any number of requests after one another."""

    key: UpdateKey
    name: str
    """Name that its worker has given to these bytes; empty if it cannot go on with them."""
    file: IO[bytes]
    size: int = 0
    requests: int = 1
    """Number of requests that have brought bytes. Only the last one goes on: its worker has given up the others."""


class Uploads:
    """At most one upload of each worker, in files that are gone with it.

    Args:
        folder: Folder of the files; None: the system's temporary folder.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._uploads: dict[str, Upload] = {}

    def received(self, key: UpdateKey, name: str) -> int:
        """Return the bytes of an upload that are here."""
        upload = self._uploads.get(key.worker)
        return upload.size if upload is not None and name and (upload.key, upload.name) == (key, name) else 0

    def begin(self, key: UpdateKey, name: str, *, offset: int) -> Upload | None:
        """Return the upload of a request that brings the bytes from an offset on; None if those before are not here."""
        if offset:
            if self.received(key, name) != offset:
                return None
            upload = self._uploads[key.worker]
            upload.requests += 1
            return upload
        self._discard(key.worker)
        upload = self._uploads[key.worker] = Upload(key=key, name=name, file=spool(self._folder))
        return upload

    def take(self, upload: Upload) -> IO[bytes]:
        """Hand over the file of an upload that has come whole."""
        self._forget(upload)
        return upload.file

    def drop(self, upload: Upload) -> None:
        """Forget an upload that failed."""
        self._forget(upload)
        upload.file.close()

    def keep_only(self, workers: Collection[str]) -> None:
        """Forget the uploads of all other workers: they have left."""
        for worker in self._uploads.keys() - set(workers):
            self._discard(worker)

    def _discard(self, worker: str) -> None:
        upload = self._uploads.get(worker)
        if upload is not None:
            upload.requests += 1  # a request that still brings bytes stops
            self.drop(upload)

    def _forget(self, upload: Upload) -> None:
        if self._uploads.get(upload.key.worker) is upload:
            del self._uploads[upload.key.worker]


def spool(folder: str | None = None) -> IO[bytes]:
    """Return an unnamed file for a delta that arrives. It is gone when it is closed."""
    return TemporaryFile(prefix="skyward-diloco-", dir=folder)
