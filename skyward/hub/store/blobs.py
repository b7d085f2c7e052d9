"""Bytes named by their SHA-256: the seam between the hub and a folder or an object store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol


class Blobs(Protocol):
    """Content-addressed storage. All calls block; services run them on threads."""

    def put(self, stream: Iterable[bytes], sha256: str | None = None, size: int | None = None) -> tuple[str, int]:
        """Store bytes and return their SHA-256 in hexadecimal and their size. A blob that exists is left alone.

        Raises:
            Refusal: They differ from `sha256` or `size`, or there is no space. Nothing is kept then.
        """
        ...

    def open(self, sha256: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Read the bytes from `start` to `end`, exclusive, in pieces."""
        ...

    def exists(self, sha256: str) -> bool: ...

    def delete(self, sha256: str) -> None:
        """Delete a blob. One that is missing is no error."""
        ...

    def presigned(self, sha256: str) -> str | None:
        """Return a URL that gives the bytes for 15 minutes, or None where the hub must hand them out itself."""
        ...
