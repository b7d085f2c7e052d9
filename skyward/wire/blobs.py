"""Blobs: large immutable bytes beside the frames, named by content.

A blob is an unlinked file in memory (memfd). Without memfd, or if memory is short, it is in a scratch folder. It is
written once and then only mapped MAP_PRIVATE: a process may write to its mapping, and no other process sees that. On
one machine the file descriptor itself is passed, so a blob exists once however many processes use it.

Descriptors are scarce: many processes may open no more than 1,024 files. Blobs take at most half of them. Further
blobs have no file; their bytes stay in the memory of the process until they are sent.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import mmap
import os
import struct
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

import xxhash

from ..core import interrupts
from ..core.limits import default_blob_limit, file_limit
from ..core.records import dataclass
from ..errors import InternalError
from .spares import SpareFile, new_file, seal, spares

DIGEST_SIZE = 16
_PLACE = struct.Struct("<16sQi")
_PIECE = 1 << 20
"""Bytes copied at a time, so that a piece is hashed and written while it is in the CPU's cache."""
_HUGE_FROM = 4 << 20
"""Bytes from which files get huge pages where the kernel can make them."""
_STORED = 128
"""Most snapshots that the client keeps beyond their calls. Each holds a descriptor open in the user's process, so a low
limit of open files lowers this number too.
"""
_SAMPLE = 4 << 10
"""Bytes of a sample of a snapshot. Snapshots whose samples differ need no comparison by digest."""


def content_digest(data: Any) -> bytes:
    """Return the XXH3-128 of the bytes. It detects accidents, not forgery: processes of a pool trust each other."""
    return xxhash.xxh3_128_digest(data)


def blob_digest(data: memoryview) -> bytes:
    """Return the name of the blob with this content: the digest of its pieces' digests."""
    hasher = xxhash.xxh3_128()
    for start in range(0, data.nbytes, _PIECE):
        hasher.update(content_digest(data[start : start + _PIECE]))
    return hasher.digest()


def pack_places(places: Iterable[tuple[bytes, int, int]]) -> str:
    """Pack names of blobs, each with its size and a count."""
    return base64.b64encode(b"".join(_PLACE.pack(*place) for place in places)).decode()


def unpack_places(text: str) -> list[tuple[bytes, int, int]]:
    """Return what `pack_places` has packed."""
    return list(_PLACE.iter_unpack(base64.b64decode(text)))


_files: set[int] = set()
"""Descriptors of this process's blobs. Finalizers change it at any moment, which is safe: each change of a set is
atomic and idempotent, unlike one of a counter.
"""


def has_room_for_files() -> bool:
    """Return whether blobs of this process may use another descriptor."""
    return len(_files) < file_limit() // 2


@dataclass(eq=False)
class Blob:
    """Immutable bytes that this process can map. Closed by `close` or by the garbage collector.

    `fd` is the descriptor of its file. It is -1 if the bytes are in memory (`is_loaded`), or if they did not arrive.
    """

    digest: bytes
    size: int
    fd: int
    _loaded: bytearray | memoryview | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.fd >= 0:
            _files.add(self.fd)

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def load(self) -> None:
        """Copy the bytes to this process's memory and close the file. After that the blob can be mapped once."""
        loaded = bytearray(self.size)
        view, at = memoryview(loaded), 0
        while at < self.size:
            at += os.preadv(self._file(), [view[at:]], at)
        self._loaded = loaded
        self.close()

    def map(self) -> mmap.mmap | bytearray | memoryview:
        """Return a fresh private mapping, readable and writable. Pages are shared until they are written.

        After `load`, return the loaded memory itself and give it up.

        Raises:
            OSError: The blob did not arrive, or cannot be mapped.
        """
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            return loaded
        if _may_be_huge(self.size):
            from .huge import map_file

            return map_file(self._file(), self.size)
        return mmap.mmap(self._file(), self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def open(self) -> int:
        """Return the descriptor of its file, which this object still owns. Move bytes in memory to a new file first.

        Raises:
            OSError: There is no free descriptor, or no room for the file.
        """
        if self._loaded is not None:
            fd = new_file("blob")
            try:
                _write_all(fd, memoryview(self._loaded))
                seal(fd)
            except BaseException:
                os.close(fd)
                raise
            self.fd, self._loaded = fd, None
            _files.add(fd)
        return self._file()

    def in_memory(self) -> memoryview | None:
        """Return the bytes if they have no file; None otherwise."""
        return None if self._loaded is None else memoryview(self._loaded)

    def _file(self) -> int:
        if self.fd < 0:
            raise OSError(
                errno.EMFILE,
                f"value of {self.size} bytes did not arrive, because this process may open only {file_limit()} files; "
                "close some, or raise the limit (ulimit -n)",
            )
        return self.fd

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _files.discard(fd)
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    @classmethod
    def unnamed(cls, data: memoryview, digest: bytes) -> Blob:
        """Copy `data` under a name of the caller's choice: for results, which are never sent twice and need no hash."""
        blob = cls(digest, data.nbytes, new_file("result"))
        if _may_be_huge(data.nbytes):
            _fill(blob.fd, data)
        else:
            _write_all(blob.fd, data)
            seal(blob.fd)
        return blob

    def here(self) -> Blob | None:
        """Return the blob with the bytes, this one; None if they are on another machine (see `engine.kept_values`)."""
        return self

    def sent_to(self, link: object) -> None:
        """Note that a node has the bytes now."""

    @classmethod
    def kept(cls, data: memoryview) -> Blob:
        """Copy `data` to a file, named by its content: for results that stay on the node and may be sent on later.

        Raises:
            OSError: There is no free descriptor, or no room for the file.
        """
        flat = data.cast("B")
        return cls._filed(flat, new_file("kept"))

    @classmethod
    def snapshot(cls, data: memoryview) -> Blob:
        """Copy `data`, and name the copy by its content, even if another thread writes to `data` meanwhile.

        Without a free descriptor or room for a file, the copy stays in memory until it is sent.
        """
        if has_room_for_files():
            with contextlib.suppress(OSError):  # no free descriptor or no room after all
                spare = spares.take(data.nbytes)
                blob = cls._filed(data, new_file("blob")) if spare is None else cls._filled(data, spare)
                spares.prepare(data.nbytes, spare)
                return blob
        loaded = bytearray(data)
        return cls(blob_digest(memoryview(loaded)), data.nbytes, -1, loaded)

    @classmethod
    def _filed(cls, data: memoryview, fd: int) -> Blob:
        """Write `data` to an empty file, piece by piece.

        Hash and write a copy of each piece, because another thread may write to `data` in between. The copy stays in
        the CPU's cache, so it costs no more memory traffic than hashing does.
        """
        blob = cls(b"", data.nbytes, fd)
        if _may_be_huge(data.nbytes):
            blob.digest = content_digest(b"".join(_fill(fd, data, content_digest)))
            return blob
        hasher = xxhash.xxh3_128()
        copy = memoryview(bytearray(min(_PIECE, data.nbytes)))
        for start in range(0, data.nbytes, _PIECE):
            piece = copy[: min(_PIECE, data.nbytes - start)]
            piece[:] = data[start : start + _PIECE]
            hasher.update(content_digest(piece))
            _write_all(blob.fd, piece, start)
        seal(blob.fd)
        blob.digest = hasher.digest()
        return blob

    @classmethod
    def _filled(cls, data: memoryview, spare: SpareFile) -> Blob:
        """Copy `data` to the pages of a spare file, and hash each piece of the copy while it is in the CPU's cache.

        Writing to mapped pages takes less than half the time of `pwrite`.
        """
        from .huge import fill  # as in `spares`

        blob = cls(b"", data.nbytes, spare.take_file(data.nbytes))
        with spare.pages() as pages:
            digests = fill(pages[: data.nbytes], data, _PIECE, content_digest, are_made=True)
        seal(blob.fd, is_mapped=True)
        blob.digest = content_digest(b"".join(digests))
        return blob


class NamedBlob(Blob):
    """Bytes that this process got from another one, which knows them by their name. They need not travel back."""

    def __init__(self, digest: bytes, data: memoryview) -> None:
        super().__init__(digest, data.nbytes, -1)
        self._data = data
        self._copy: Blob | None = None

    def here(self) -> Blob:
        if self._copy is None:
            self._copy = Blob.snapshot(self._data)
        return self._copy


class BlobWriter:
    """Writer of a blob that arrives in pieces, in order. Owns the file until `finish` hands it over.

    Without a free descriptor or room for the file, the pieces are dropped. The frames behind them still arrive, and
    only the call that needs the blob fails.
    """

    def __init__(self, digest: bytes, size: int, *, is_named_by_content: bool) -> None:
        self._digest = digest
        self._size = size
        self._done = self._hashed = 0
        self._hasher = xxhash.xxh3_128() if is_named_by_content else None
        self._piece = xxhash.xxh3_128()
        self._fd = -1
        with contextlib.suppress(OSError):  # no free descriptor or no room: `write` drops the pieces
            self._fd = new_file("blob")

    @property
    def is_complete(self) -> bool:
        return self._done == self._size

    def write(self, offset: int, piece: memoryview) -> None:
        """Append the piece at `offset`.

        Raises:
            InternalError: It is not the next piece, or exceeds the blob's size.
        """
        if offset != self._done or offset + piece.nbytes > self._size:
            raise InternalError(f"wire: piece of a blob at byte {offset}, expected at {self._done}; report this bug")
        if self._fd >= 0:
            try:
                _write_all(self._fd, piece, offset)
            except OSError:
                self._drop()
        self._hash(piece)
        self._done += piece.nbytes

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _hash(self, piece: memoryview) -> None:
        if self._hasher is None:
            return
        while piece.nbytes:
            take = min(piece.nbytes, _PIECE - self._hashed % _PIECE)
            self._piece.update(piece[:take])
            self._hashed += take
            piece = piece[take:]
            if self._hashed % _PIECE == 0 or self._hashed == self._size:
                self._hasher.update(self._piece.digest())
                self._piece.reset()

    def finish(self) -> int:
        """Return the file's descriptor, which the caller owns from now on. -1: there was no room for the file.

        Raises:
            InternalError: The content does not match the blob's name.
        """
        if self._hasher is not None and self._hasher.digest() != self._digest:
            raise InternalError(f"wire: blob {self._digest.hex()} was damaged on its way; send it again")
        if self._fd >= 0:
            seal(self._fd)
        fd, self._fd = self._fd, -1
        return fd

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def _may_be_huge(size: int) -> bool:
    """Return whether a file of that size gets huge pages."""
    if size < _HUGE_FROM:
        return False
    from .huge import is_possible  # only now, because agents have no use for it, and it takes memory

    return is_possible()


def _fill(fd: int, data: memoryview, digest: Callable[[memoryview], bytes] | None = None) -> list[bytes]:
    """Copy `data` to an empty file with huge pages, and seal it. Return the digests of its pieces."""
    from .huge import allocate, fill

    digests = fill(allocate(fd, data.nbytes), data, _PIECE, digest)
    seal(fd, is_mapped=True)
    return digests


def _write_all(fd: int, data: memoryview, at: int = 0) -> None:
    while data.nbytes:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def spill(blob: Blob, folder: str) -> Blob:
    """Move `blob` to an unlinked file under `folder` and return the new blob, which is mapped in the same way."""
    import tempfile  # only when memory is full: it takes longer to import than all of this module

    with tempfile.TemporaryFile(dir=folder, prefix="blob-") as file:
        offset = 0
        while offset < blob.size:
            offset += os.sendfile(file.fileno(), blob.fd, offset, blob.size - offset)
        moved = Blob(blob.digest, blob.size, os.dup(file.fileno()))
    blob.close()
    return moved


def _sample(data: memoryview) -> bytes:
    """Return the digest of the size and a few bytes. If another thread changes those, it costs time only."""
    middle = data.nbytes // 2
    parts = data[:_SAMPLE], data[middle : middle + _SAMPLE], data[-_SAMPLE:]
    return content_digest(b"".join((data.nbytes.to_bytes(8, "little"), *parts)))


class BlobStore:
    """Snapshots of the client, shared by all calls that send the same bytes. Thread-safe.

    Snapshots that no call needs are kept as long as the total stays within `limit_bytes`. The least recently used are
    dropped first, and copied again when they are needed again.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = default_blob_limit() if limit_bytes is None else limit_bytes
        self._most = min(_STORED, file_limit() // 8)
        self._kept: OrderedDict[bytes, Blob] = OrderedDict()
        """Snapshots that stay when their calls have ended, the most recently used last."""
        self._alive: dict[bytes, weakref.ref[Blob]] = {}
        """All snapshots that exist: those in `_kept`, and those that only a call still refers to."""
        self._samples: Counter[bytes] = Counter()
        """Number of snapshots in `_alive` with each sample."""
        self._asked: OrderedDict[bytes, None] = OrderedDict()
        """Samples of bytes that `is_repeated` was asked about, the oldest first."""
        self._bytes = 0
        """Total size of the snapshots in `_alive`."""
        # Reentrant, because the garbage collector may run `_forget` in a thread that holds the lock.
        self._lock = threading.RLock()

    def is_repeated(self, data: memoryview) -> bool:
        """Return whether these bytes were probably put, or asked about, before. A blob is then worth its cost."""
        sample = _sample(data)
        if self._samples.get(sample) or sample in self._asked:
            return True
        with self._lock:
            self._asked[sample] = None
            while len(self._asked) > _STORED:
                self._asked.popitem(last=False)
        return False

    def put(self, data: memoryview) -> Blob:
        """Return the blob with this content: an existing one, or a new snapshot."""
        flat = data if data.ndim == 1 and data.format == "B" else data.cast("B")
        sample = _sample(flat)
        if self._samples.get(sample):  # hashing takes a third of a copy's time, and is futile for new bytes
            known = self._find(blob_digest(flat))
            if known is not None:
                return known
        snapshot = Blob.snapshot(flat)
        interrupts.hold()  # a Ctrl+C between two lines of `_add` would leave its counts wrong
        try:
            with self._lock:
                # Another thread may have added the same content while this one copied it.
                return self._find(snapshot.digest) or self._add(snapshot, sample)
        finally:
            interrupts.let_go()

    def _find(self, digest: bytes) -> Blob | None:
        with self._lock:
            known = self._alive.get(digest)
            blob = None if known is None else known()
            if blob is not None:
                self._keep(blob)
            return blob

    def _add(self, blob: Blob, sample: bytes) -> Blob:
        digest, size, this = blob.digest, blob.size, weakref.ref(self)

        def forget(_: weakref.ref[Blob]) -> None:
            store = this()
            if store is not None:
                store._forget(digest, size, sample)

        self._samples[sample] += 1
        self._bytes += size
        self._alive[digest] = weakref.ref(blob, forget)
        self._keep(blob)
        return blob

    def _keep(self, blob: Blob) -> None:
        self._kept[blob.digest] = blob
        self._kept.move_to_end(blob.digest)
        # A snapshot that a call needs frees nothing when it is dropped, so the next one is dropped too.
        while len(self._kept) > 1 and (self._bytes > self._limit or len(self._kept) > self._most):
            self._kept.popitem(last=False)

    def _forget(self, digest: bytes, size: int, sample: bytes) -> None:
        """Remove a snapshot that was garbage-collected: no call needs it, and it is not kept."""
        with self._lock:
            known = self._alive.get(digest)
            if known is not None and known() is None:
                del self._alive[digest]
            self._bytes -= size
            self._samples[sample] -= 1
            if not self._samples[sample]:
                del self._samples[sample]

    def clear(self) -> None:
        """Drop all snapshots that no call needs."""
        with self._lock:
            self._kept.clear()
