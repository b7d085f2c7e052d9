"""A file that is hashed on its way to where it is written."""

from __future__ import annotations

from typing import Any, Protocol

import xxhash

__all__ = ["HashingFile", "Writer", "digest_of"]

_SMALL = 64 << 10
_GATHERED = 1 << 20
_PIECE = 8 << 20
"""Of a large tensor at once: it can be on its way to the disk while the next one is copied."""


class Writer(Protocol):
    def write(self, view: memoryview, /) -> object:
        """All of it."""


class HashingFile:
    """Writes to a file, counts and hashes what passes. The first error is kept, and `finish` raises it.

    torch.save's writer cannot have an exception pass through it: it ends the process, or loses the error. It writes
    five pieces of some bytes for each tensor, which are gathered here.
    """

    def __init__(self, file: Writer) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._gathered = bytearray()
        self._error: BaseException | None = None
        self.bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.bytes += len(view)
        if len(view) < _SMALL:
            self._gathered += view
            if len(self._gathered) >= _GATHERED:
                self._write_gathered()
        else:
            self._write_gathered()
            self._write(view)
        return len(view)

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        """For torch.save; `finish` writes what is left."""

    def close(self) -> None:
        """For torch.distributed.checkpoint; whoever made this closes the file."""

    def finish(self) -> None:
        """When all is written. Raises: what the writing did."""
        self._write_gathered()
        if self._error is not None:
            raise self._error

    @property
    def digest(self) -> str:
        return f"xxh3:{self._hash.hexdigest()}"

    def _write_gathered(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        if gathered:
            self._write(memoryview(gathered))

    def _write(self, view: memoryview) -> None:
        for begin in range(0, len(view), _PIECE):
            if self._error is not None:
                return
            piece = view[begin : begin + _PIECE]
            try:
                self._file.write(piece)
                self._hash.update(piece)
            except BaseException as error:
                self._error = error


def digest_of(data: bytes) -> str:
    """As `HashingFile.digest`."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"
