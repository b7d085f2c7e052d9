"""Bytes named by their SHA-256: the seam between the hub and a folder or an object store."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ..model.refusal import Reason, Refusal

PIECE = 1 << 20
"""Bytes that are read at once."""
UNFINISHED_S = 24 * 3600
"""Seconds for which an upload may last. Several servers share a place, so a younger one may be of another server."""
HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket of an object store that speaks S3's protocol.

    Attributes:
        name: Its name.
        prefix: Beginning of the keys.
        endpoint: URL of the service. Empty: AWS.
        region: Its region. Empty: as boto3 finds it.
        access_key: Empty: credentials as boto3 finds them, such as an instance's role.
    """

    name: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)


class NewBlob(Protocol):
    """A blob on its way in. End it by `finish` or `abort`."""

    def write(self, piece: bytes) -> None:
        """Add bytes.

        Raises:
            Refusal: There is no space.
        """
        ...

    def finish(self, sha256: str | None = None, size: int | None = None) -> tuple[str, int]:
        """Keep the blob durably, and return its SHA-256 in hexadecimal and its size. One that exists is left alone.

        Raises:
            Refusal: The bytes differ from `sha256` or `size`, or there is no space. Nothing is kept then.
        """
        ...

    def abort(self) -> None:
        """Keep nothing. Calling it after `finish` does nothing."""
        ...


class Blobs(Protocol):
    """Content-addressed storage. All calls block; services run them on threads."""

    def writer(self) -> NewBlob:
        """Begin a blob."""
        ...

    def open(self, sha256: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Read the bytes from `start` to `end`, exclusive, in pieces.

        Raises:
            Refusal: The blob is missing.
        """
        ...

    def exists(self, sha256: str) -> bool: ...

    def delete(self, sha256: str) -> None:
        """Delete a blob. One that is missing is no error."""
        ...

    def presigned(self, sha256: str) -> str | None:
        """Return a URL that gives the bytes for 15 minutes, or None where the hub must hand them out itself."""
        ...

    def clean_up(self) -> None:
        """Remove uploads that broke off more than a day ago."""
        ...


def put_blob(
    blobs: Blobs, stream: Iterable[bytes], sha256: str | None = None, size: int | None = None
) -> tuple[str, int]:
    """Store a stream as one blob, see `NewBlob.finish`."""
    writer = blobs.writer()
    try:
        for piece in stream:
            writer.write(piece)
        return writer.finish(sha256, size)
    finally:
        writer.abort()


def check_content(found: tuple[str, int], sha256: str | None, size: int | None) -> None:
    """Compare what was received with what was announced.

    Raises:
        Refusal: They differ.
    """
    if size is not None and found[1] != size:
        raise Refusal(
            Reason.INVALID, f"size={size}: {found[1]} bytes were received; send the whole file again", field="size"
        )
    if sha256 is not None and found[0] != sha256.lower():
        raise Refusal(
            Reason.INVALID,
            f"sha256={sha256[:80]!r}: the bytes received have {found[0]}; send the file again",
            field="sha256",
        )


def missing_blob(sha256: str) -> Refusal:
    return Refusal(Reason.MISSING, f"blob={sha256[:80]!r}: its bytes are missing; upload the artifact again")
