"""File that is hashed while it is written."""

from __future__ import annotations

from typing import Any, Protocol

import xxhash

_SMALL = 64 << 10
_GATHERED = 1 << 20
_PIECE = 8 << 20
"""Piece of a large tensor that is written at once: it goes to the disk while the next one is copied."""


class Writer(Protocol):
    def write(self, view: memoryview, /) -> object:
        """Write all of the view."""


class HashingFile:
    """Write to a file, and count and hash its contents. The first error is kept until `finish` raises it.

    An exception must not pass through torch.save's writer, which would end the process or lose the error. torch.save
    writes five small pieces for each tensor; they are gathered here.
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
        """Do nothing. torch.save calls it; `finish` writes the rest."""

    def close(self) -> None:
        """Do nothing. torch.distributed.checkpoint calls it; the owner closes the file."""

    def finish(self) -> None:
        """Write the rest, and raise the first error of any write."""
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
    """Return the digest of `data`, in the form of `HashingFile.digest`."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"
