"""Memory that two processes see: one writes the large buffers of a job there, the other reads them where they are.

The same pages serve every job, so that only the first pays for getting them from the system. There is one job at a
time; what is read is true until the next one is written.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from ....wire.blobs import Blob
from ....wire.tasks import Parsed

__all__ = ["Arena", "ArenaView"]

_ALIGNMENT = 64
"""Bytes: of the widest registers, and of a cache line."""


class Arena:
    """The writer's side. Used by one thread; closed by `close`."""

    def __init__(self) -> None:
        self.fd = _new_file()
        self._at = 0

    def begin(self, *, keep: bool) -> None:
        """What was written is not needed any more. keep: its pages stay for what is written next."""
        self._at = 0
        if not keep:
            os.ftruncate(self.fd, 0)

    def put(self, data: memoryview) -> Blob:
        """Copies it; gives a name by which `ArenaView.pieces` finds it. Raises OSError: there is no room."""
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
    """The reader's side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def pieces(self, parsed: Parsed) -> list[Blob]:
        """What `Arena.put` wrote, in the order of the references."""
        size = os.fstat(self._fd).st_size
        if parsed.references and (self._map is None or len(self._map) != size):
            self._map = mmap.mmap(self._fd, size)
        return [_Piece(int.from_bytes(name, "little"), length, self._map) for name, length in parsed.references]


class _Piece(Blob):
    """A part of an arena in the place of a blob: nothing of its own is open."""

    def __init__(self, start: int, size: int, of: mmap.mmap | None = None) -> None:
        super().__init__(start.to_bytes(16, "little"), size, -1)
        self._start, self._of = start, of

    def map(self) -> memoryview:  # type: ignore[override]  # it is only ever read as a buffer
        assert self._of is not None
        return memoryview(self._of)[self._start : self._start + self.size]

    def close(self) -> None:
        """The arena stays open."""


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("skyward-evaluation", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="skyward-evaluation-") as file:  # macOS
        return os.dup(file.fileno())
