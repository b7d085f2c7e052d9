"""Frames on their way to a worker. One whose connection breaks goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PARTIAL = 206
"""Status of an answer with the rest of a frame."""


class Download:
    """Body of an answer: the bytes that have come, by any number of requests after one another.

    The server names exactly these bytes by a tag. If a later answer is another frame, it comes whole.
    """

    def __init__(self) -> None:
        self.carried = 0
        """Bytes that have come and that a later request need not bring again, of all bodies. It never falls."""
        self._clear()

    @property
    def query(self) -> dict[str, Any]:
        """Part of a query that asks for the rest alone; empty if nothing is here that a request can go on with."""
        return {"tag": self._tag, "offset": self._size} if self._tag and self._size else {}

    def receive(self, read_into: Callable[[memoryview], int], *, status: int, tag: str, size: int) -> bytearray:
        """Read the body of one answer, and return the whole body. It is in memory that tensors can share.

        Args:
            read_into: Function that reads the next bytes into the beginning of some memory, and returns their number.
            status: Status of the answer.
            tag: Name of the whole body; empty if a later request cannot go on with it.
            size: Bytes of this answer.

        Raises:
            EOFError: There was no whole body. The bytes that have come are kept.
        """
        if status != PARTIAL:
            self._tag, self._body, self._size = tag, bytearray(size), 0
        elif (tag, size) != (self._tag, len(self._body) - self._size):
            self._clear()
            raise EOFError("the rest of another frame came")
        rest = memoryview(self._body)[self._size :]
        while rest.nbytes:
            count = read_into(rest)
            if count == 0:
                raise EOFError(f"{rest.nbytes} bytes are missing")
            self._size += count
            self.carried += count if self._tag else 0
            rest = rest[count:]
        body = self._body
        self._clear()
        return body

    def _clear(self) -> None:
        self._tag, self._body, self._size = "", bytearray(), 0


def download_for(status: int, download: Download | None) -> Download:
    """Return the download that an answer belongs to. A refusal is no part of a frame."""
    return download if download is not None and status in (200, PARTIAL) else Download()
