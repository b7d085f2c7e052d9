"""Mappings of large arguments that outlive their call.

To map 100 MB and read it costs thousands of page faults, and to unmap it nearly as much. So a slot keeps the mappings
of the latest large arguments, and a call that gets the same bytes again reads them at once.

A call may write to its arguments. So a mapping is used again only if nothing refers to it and no page of it was
written, which the kernel tells (/proc/self/pagemap). Without that file every call gets a new mapping. The pages of a
mapping without writes belong to the file, so it needs no memory of its own. The agent tells when it drops the file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...wire.blobs import Blob
from ...wire.pull import address_of

LEAST_BYTES = 1 << 20
"""Smallest argument whose mapping is kept; a few page faults are cheaper than a record of them."""
_COUNT = 16
"""Most mappings that are kept. Each holds a descriptor."""
_PAGEMAP = "/proc/self/pagemap"
_ENTRY = 8
"""Bytes of the kernel's record of a page."""
_READ = 1 << 16
_PRESENT_OR_SWAPPED, _OF_FILE = 0xC0, 0x20
"""Bits of the last byte of a record: the page exists, and it is one of the file."""
_CLEAN = bytes(flags for flags in range(256) if not flags & _PRESENT_OR_SWAPPED or flags & _OF_FILE)
"""Last bytes of records of pages that this process has not written to."""


class Mapping(NamedTuple):
    """Mapping of a blob: a part of the memory that `owner` unmaps."""

    owner: mmap.mmap
    start: int
    size: int

    def view(self) -> memoryview:
        return memoryview(self.owner)[self.start : self.start + self.size]


def _mapping_of(made: mmap.mmap | bytearray | memoryview) -> Mapping | None:
    """Return what `Blob.map` made if it is a mapping of a file; None if it is memory of this process."""
    if isinstance(made, mmap.mmap):
        return Mapping(made, 0, len(made))
    if isinstance(made, memoryview) and isinstance(made.obj, mmap.mmap):
        return Mapping(made.obj, address_of(made) - address_of(memoryview(made.obj)), made.nbytes)
    return None


class LentBlob:
    """Blob of a call, which maps it at most once."""

    def __init__(self, blob: Blob, mappings: Mappings) -> None:
        self.digest = blob.digest
        self._blob = blob
        self._mappings = mappings
        self.mapping: Mapping | None = None

    def map(self) -> Any:
        """Return writable bytes: a mapping that was kept, or a new one. Raises OSError as `Blob.map` does."""
        self.mapping = self._mappings.take(self.digest)
        if self.mapping is None:
            made = self._blob.map()
            self.mapping = _mapping_of(made)
            if self.mapping is None:
                return made
        return self.mapping.view()


class Mappings:
    """Mappings that wait for the next call that gets the same bytes. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Mapping] = OrderedDict()
        self._on_node: set[bytes] = set()
        """Blobs that calls use and the agent has not dropped."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, blobs: tuple[Blob, ...]) -> Iterator[tuple[Blob | LentBlob, ...]]:
        """Give a call its blobs, and keep their mappings when it has ended."""
        lent = tuple(LentBlob(blob, self) if blob.size >= LEAST_BYTES else blob for blob in blobs)
        with self._lock:
            self._on_node.update(blob.digest for blob in lent if isinstance(blob, LentBlob))
        try:
            yield lent
        finally:
            for blob in lent:
                if isinstance(blob, LentBlob):
                    self._take_back(blob)

    def take(self, digest: bytes) -> Mapping | None:
        """Hand over a mapping of this blob. Nobody else gets it meanwhile."""
        with self._lock:
            return self._kept.pop(digest, None)

    def drop(self, digest: bytes) -> None:
        """Unmap a blob that the node drops."""
        with self._lock:
            self._on_node.discard(digest)
            self._kept.pop(digest, None)  # the garbage collector closes it

    def _take_back(self, blob: LentBlob) -> None:
        mapping, blob.mapping = blob.mapping, None
        if mapping is None or blob.digest not in self._on_node:
            return
        # An array that the call left behind refers to the mapping. Counts are compared with that of an object which
        # only this function has, because their absolute values differ between versions of Python.
        mark = object()
        owner = mapping.owner
        count, alone = (sys.getrefcount(one) for one in (owner, mark))
        if count - 1 > alone or _was_written(mapping):  # `mapping` refers to it, too
            return
        with self._lock:
            if blob.digest in self._on_node and blob.digest not in self._kept:
                self._kept[blob.digest] = mapping
            while len(self._kept) > _COUNT:
                self._kept.popitem(last=False)


def _was_written(mapping: Mapping) -> bool:
    """Return whether this process has written to a private mapping, or may have: it has pages of its own then."""
    pages = -(-mapping.size // mmap.PAGESIZE)
    at = address_of(mapping.view()) // mmap.PAGESIZE * _ENTRY
    end = at + pages * _ENTRY
    try:
        fd = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not Linux, or no /proc
        return True
    try:
        while at < end:
            records = os.pread(fd, min(_READ, end - at), at)
            if not records or records[_ENTRY - 1 :: _ENTRY].translate(None, _CLEAN):
                return True
            at += len(records)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
