"""Memory shared by two processes: one writes a job's large buffers, the other reads them in place.

All jobs use the same pages, so only the first job pays for getting them from the system. There is one job at a time,
and its data is valid until the next one is written.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from ....wire.blobs import Blob
from ....wire.tasks import Parsed

_ALIGNMENT = 64
"""Bytes; covers the widest SIMD registers and a cache line."""


class Arena:
    """Writer's side of the memory. Used by one thread; ended by `close`."""

    def __init__(self) -> None:
        self.fd = _new_file()
        self._at = 0

    def begin(self, *, keep: bool) -> None:
        """Discard the previous job's data; `keep` reuses its pages for the next data."""
        self._at = 0
        if not keep:
            os.ftruncate(self.fd, 0)

    def put(self, data: memoryview) -> Blob:
        """Copy a buffer; return a name for `ArenaView.pieces`. Raises OSError if there is no room."""
        start = self._at
        flat = data if data.ndim == 1 and data.format == "B" else data.cast("B")
        done = 0
        while done < flat.nbytes:
            done += os.pwrite(self.fd, flat[done:], start + done)
        self._at = -(-(start + flat.nbytes) // _ALIGNMENT) * _ALIGNMENT
        return _Piece(start, flat.nbytes)

    def close(self) -> None:
        os.close(self.fd)


class ArenaView:
    """Reader's side of the memory."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def pieces(self, parsed: Parsed) -> list[Blob]:
        """Return the buffers that `Arena.put` wrote, in the order of the references."""
        size = os.fstat(self._fd).st_size
        if parsed.references and (self._map is None or len(self._map) != size):
            self._map = mmap.mmap(self._fd, size)
        return [_Piece(int.from_bytes(name, "little"), length, self._map) for name, length in parsed.references]


class _Piece(Blob):
    """Part of an arena in place of a blob; has nothing to close."""

    def __init__(self, start: int, size: int, mapped: mmap.mmap | None = None) -> None:
        super().__init__(start.to_bytes(16, "little"), size, -1)
        self._start, self._mapped = start, mapped

    def map(self) -> memoryview:
        assert self._mapped is not None
        return memoryview(self._mapped)[self._start : self._start + self.size]

    def close(self) -> None:
        """Do nothing, because the arena stays open."""


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("skyward-evaluation", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="skyward-evaluation-") as file:  # macOS
        return os.dup(file.fileno())
