"""Files in memory for blobs, and a spare one whose pages are allocated and mapped before they are needed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

from ..core.limits import default_blob_limit

_LEAST, _MOST = 4 << 20, 512 << 20
"""Sizes of blobs in bytes for which a spare file is prepared."""
_KEPT_S = 5.0
_SEALS = getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SHRINK", 0)
_SEAL_WRITE = getattr(fcntl, "F_SEAL_WRITE", 0)
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of linux/fcntl.h (Linux 5.1): existing mappings may write, and nothing else."""


def new_file(name: str) -> int:
    """Return the descriptor of an empty file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"skyward-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    import tempfile

    with tempfile.TemporaryFile(prefix=f"skyward-{name}-") as file:  # macOS
        return os.dup(file.fileno())


def seal(fd: int, *, is_mapped: bool = False) -> None:
    """Let nobody change the file anymore. `is_mapped`: this process still has a writable mapping, and will drop it."""
    if _SEALS and hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | (_SEAL_FUTURE_WRITE if is_mapped else _SEAL_WRITE))


class SpareFile:
    """Empty file with allocated pages, which this process has mapped.

    Raises:
        OSError: Descriptors or memory are short, or the kernel cannot do it.
    """

    def __init__(self, size: int) -> None:
        from .huge import allocate, make_pages  # here, because agents have no use for it, and it takes memory

        self.size, self._fd = size, -1
        self._fd = new_file("blob")
        try:
            self._pages = allocate(self._fd, size)
            make_pages(self._pages)
        except BaseException:
            self.close()
            raise

    def take_file(self, size: int) -> int:
        """Return the descriptor, which the caller owns from now on. The file has that size."""
        fd, self._fd = self._fd, -1
        os.ftruncate(fd, size)
        return fd

    @contextlib.contextmanager
    def pages(self) -> Iterator[memoryview]:
        """Lend the mapped pages. The file has all that is written there."""
        with memoryview(self._pages) as view:
            yield view

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class _Spares:
    """Spare file for the next blob of about the same size.

    The kernel takes three times as long to allocate 100 MB of zeroed pages as it takes to fill them, and a program that
    sends one large array usually sends another. A thread prepares the spare file while the call runs. It is released
    if nobody uses it for `_KEPT_S` seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: SpareFile | None = None
        self._is_busy = False
        self._timer: threading.Timer | None = None

    def take(self, size: int) -> SpareFile | None:
        """Return the spare file if it fits."""
        with self._lock:
            spare = self._spare
            if spare is None or not size <= spare.size <= 2 * size:
                return None
            self._spare = None
            return spare

    def prepare(self, size: int, used: SpareFile | None) -> None:
        """Start to prepare a spare file of this size in the background, and to unmap the pages of the last one."""
        if not _LEAST <= size <= min(_MOST, default_blob_limit()) or not hasattr(os, "memfd_create"):
            return
        with self._lock:
            if self._is_busy or (self._spare is not None and self._spare.size >= size):
                return
            self._is_busy = True
        try:
            threading.Thread(target=self._make, args=(size, [used]), name="skyward-spare", daemon=True).start()
        except RuntimeError:  # this process cannot start another thread, so there is no spare file
            self._is_busy = False

    def _make(self, size: int, used: list[SpareFile | None]) -> None:
        used.clear()
        spare: SpareFile | None = None
        with contextlib.suppress(OSError):  # there is no spare file
            spare = SpareFile(size)
        with self._lock:
            self._is_busy = False
            self._drop()
            self._spare = spare
            if spare is not None:
                self._drop_later(spare)

    def _drop_later(self, spare: SpareFile) -> None:
        self._timer = threading.Timer(_KEPT_S, self._expire, (spare,))
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError:  # without a timer nobody would release the spare file
            self._timer = None
            self._drop()

    def _expire(self, spare: SpareFile) -> None:
        with self._lock:
            if self._spare is spare:
                self._drop()

    def _drop(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def forget_in_child(self) -> None:
        """Start empty after a fork.

        The thread that prepared a file does not exist in the child, and the lock may be held by it forever.
        """
        if self._spare is not None:
            self._spare.close()
        self.__init__()  # type: ignore[misc]


spares = _Spares()
os.register_at_fork(after_in_child=spares.forget_in_child)
