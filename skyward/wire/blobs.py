"""Blobs: large immutable bytes beside the frames, named by content.

A blob is an unlinked file in memory (memfd) or, where there is none or memory is short, in a scratch folder. It is
written once and then only mapped MAP_PRIVATE: whoever maps it may write, and nobody else sees it. On one machine the
file descriptor itself is passed, so a blob exists once however many processes use it.

Descriptors are scarce: many processes may open no more than 1,024 files. So blobs take at most half of them. Beyond
that the bytes of a blob stay in the memory of the process, without a file, until they are sent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ..core import interrupts
from ..core.limits import file_limit, memory_bytes
from ..errors import InternalError

__all__ = ["DIGEST_SIZE", "Blob", "BlobStore", "BlobWriter", "blob_digest", "content_digest", "default_limit", "spill"]

DIGEST_SIZE = 16
_PIECE = 1 << 20
"""Bytes copied at a time: a piece is hashed and written while it is still in the cache."""
_STORED = 128
"""Snapshots that the client keeps at most beyond their calls: each is an open descriptor in the user's process. Fewer
where it may open few."""
_SPARE_LEAST, _SPARE_MOST = 4 << 20, 512 << 20
_SPARE_S = 5.0
_SEALS = getattr(fcntl, "F_SEAL_WRITE", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SHRINK", 0)


def content_digest(data: Any) -> bytes:
    """XXH3-128 of the bytes. It guards against accidents, not against a forger: peers of a pool trust each other."""
    return xxhash.xxh3_128_digest(data)


def blob_digest(data: memoryview) -> bytes:
    """The name of the blob with this content: the digest of its pieces' digests."""
    hasher = xxhash.xxh3_128()
    for start in range(0, data.nbytes, _PIECE):
        hasher.update(content_digest(data[start : start + _PIECE]))
    return hasher.digest()


_files: set[int] = set()
"""Descriptors of this process's blobs. A set, for it is changed by finalizers too, at any moment."""


def has_room_for_files() -> bool:
    """Whether this process may open another file for a blob."""
    return len(_files) < file_limit() // 2


@dataclass(eq=False)
class Blob:
    """Immutable bytes that this process can map. Closed when it is garbage or by `close`.

    `fd`: of its file; -1: it has none, because its bytes are in memory (`is_loaded`), or because it did not arrive.
    """

    digest: bytes
    size: int
    fd: int
    _loaded: bytearray | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.fd >= 0:
            _files.add(self.fd)

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def load(self) -> None:
        """Copy it to memory of this process and close the file; it can be mapped once then."""
        loaded = bytearray(self.size)
        view, at = memoryview(loaded), 0
        while at < self.size:
            at += os.preadv(self._file(), [view[at:]], at)
        self._loaded = loaded
        self.close()

    def map(self) -> mmap.mmap | bytearray:
        """A fresh private mapping, readable and writable; pages are shared until they are written.

        After `load`, the memory that it was loaded to, which is given away. Raises OSError.
        """
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            return loaded
        return mmap.mmap(self._file(), self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def open(self) -> int:
        """The descriptor of its file, which stays this object's; bytes that are in memory are moved to a new one.

        Raises OSError: there is no descriptor or no room for it.
        """
        if self._loaded is not None:
            fd = _new_file("blob")
            try:
                _write_all(fd, memoryview(self._loaded))
                _seal(fd)
            except BaseException:
                os.close(fd)
                raise
            self.fd, self._loaded = fd, None
            _files.add(fd)
        return self._file()

    def in_memory(self) -> memoryview | None:
        """Its bytes, where they have no file."""
        return None if self._loaded is None else memoryview(self._loaded)

    def _file(self) -> int:
        if self.fd < 0:
            raise OSError(
                errno.EMFILE,
                f"a value of {self.size} bytes did not arrive; this process may open {file_limit()} files: "
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
        """A copy of `data` under a name that the caller made up: for results, which nobody sends twice."""
        blob = cls(digest, data.nbytes, _new_file("result"))
        _write_all(blob.fd, data)
        _seal(blob.fd)
        return blob

    @classmethod
    def snapshot(cls, data: memoryview) -> Blob:
        """A copy of `data`, named by what was copied, even if another thread writes to `data` meanwhile.

        Where there is no descriptor or no room for a file, the copy stays in memory until it is sent.
        """
        if has_room_for_files():
            with contextlib.suppress(OSError):  # no descriptor or no room after all
                return cls._filed(data)
        loaded = bytearray(data)
        return cls(blob_digest(memoryview(loaded)), data.nbytes, -1, loaded)

    @classmethod
    def _filed(cls, data: memoryview) -> Blob:
        """Each piece is hashed before and after it was written: while it is in the cache the second time costs little.
        A piece that changed in between goes through a buffer of our own.
        """
        blob = cls(b"", data.nbytes, spares.take(data.nbytes))
        hasher = xxhash.xxh3_128()
        for start in range(0, data.nbytes, _PIECE):
            piece = data[start : start + _PIECE]
            before = content_digest(piece)
            _write_all(blob.fd, piece, start)
            if content_digest(piece) != before:
                piece = memoryview(bytes(piece))
                _write_all(blob.fd, piece, start)
                before = content_digest(piece)
            hasher.update(before)
        _seal(blob.fd)
        spares.prepare(data.nbytes)
        blob.digest = hasher.digest()
        return blob


class BlobWriter:
    """A blob that arrives in pieces, in order. `finish` gives its file; until then it is this object's to close.

    Where there is no descriptor or no room for it, its pieces are dropped, so that what comes behind it still arrives.
    """

    def __init__(self, digest: bytes, size: int, *, is_named_by_content: bool) -> None:
        self._digest = digest
        self._size = size
        self._done = self._hashed = 0
        self._hasher = xxhash.xxh3_128() if is_named_by_content else None
        self._piece = xxhash.xxh3_128()
        self._fd = -1
        with contextlib.suppress(OSError):  # no descriptor or no room: the bytes stay in memory
            self._fd = _new_file("blob")

    @property
    def is_complete(self) -> bool:
        return self._done == self._size

    def write(self, offset: int, piece: memoryview) -> None:
        """The piece at `offset`. Raises InternalError: it is not the next one."""
        if offset != self._done or offset + piece.nbytes > self._size:
            raise InternalError(f"wire: a piece of a blob at {offset}, but the next one begins at {self._done}")
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
        """The descriptor, which is now the caller's; -1: there was no room for it.

        Raises InternalError: the content is not that of the name.
        """
        if self._hasher is not None and self._hasher.digest() != self._digest:
            raise InternalError(f"wire: blob {self._digest.hex()} did not arrive as it was sent")
        if self._fd >= 0:
            _seal(self._fd)
        fd, self._fd = self._fd, -1
        return fd

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def _new_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"skyward-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(prefix=f"skyward-{name}-") as file:  # macOS
        return os.dup(file.fileno())


class _Spares:
    """One empty file whose pages are there already, for the next blob of about the same size.

    Getting 100 MB of zeroed pages from the kernel takes three times as long as filling them, and a program that sends
    one large array usually sends another. A thread makes the spare while the call runs; unused, it is given back
    after `_SPARE_S`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0
        self._is_busy = False
        self._timer: threading.Timer | None = None

    def take(self, size: int) -> int:
        """A file for `size` bytes, the spare one if it fits."""
        with self._lock:
            if self._fd >= 0 and size <= self._size <= 2 * size:
                fd, self._fd = self._fd, -1
                os.ftruncate(fd, size)
                return fd
        return _new_file("blob")

    def prepare(self, size: int) -> None:
        """Begin to make a spare of this size."""
        if not _SPARE_LEAST <= size <= min(_SPARE_MOST, default_limit()) or not hasattr(os, "memfd_create"):
            return
        with self._lock:
            if self._is_busy or (self._fd >= 0 and self._size >= size):
                return
            self._is_busy = True
        try:
            threading.Thread(target=self._make, args=(size,), name="skyward-spare", daemon=True).start()
        except RuntimeError:  # no more threads: no spare, then
            self._is_busy = False

    def _make(self, size: int) -> None:
        fd = -1
        try:
            fd = _new_file("blob")
            os.posix_fallocate(fd, 0, size)
        except OSError:  # descriptors or memory are short: no spare, then
            if fd >= 0:
                os.close(fd)
            fd = -1
        with self._lock:
            self._is_busy = False
            self._drop()
            self._fd, self._size = fd, size
            if fd >= 0:
                self._drop_later(fd)

    def _drop_later(self, fd: int) -> None:
        self._timer = threading.Timer(_SPARE_S, self._expire, (fd,))
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError:  # no more threads
            self._timer = None
            self._drop()

    def _expire(self, fd: int) -> None:
        with self._lock:
            if self._fd == fd:
                self._drop()

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def forget_in_child(self) -> None:
        """After a fork: the thread that was making one is not there."""
        if self._fd >= 0:
            os.close(self._fd)
        self.__init__()  # type: ignore[misc]


spares = _Spares()
os.register_at_fork(after_in_child=spares.forget_in_child)


def _write_all(fd: int, data: memoryview, at: int = 0) -> None:
    while data.nbytes:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _seal(fd: int) -> None:
    if _SEALS and hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def default_limit() -> int:
    """Bytes of blobs that may lie in memory: a quarter of what this process may use."""
    return memory_bytes() // 4


def spill(blob: Blob, folder: str) -> Blob:
    """The same blob in an unlinked file under `folder`; the one in memory is closed. Mapping it works as before."""
    with tempfile.TemporaryFile(dir=folder, prefix="blob-") as file:
        offset = 0
        while offset < blob.size:
            offset += os.sendfile(file.fileno(), blob.fd, offset, blob.size - offset)
        moved = Blob(blob.digest, blob.size, os.dup(file.fileno()))
    blob.close()
    return moved


class BlobStore:
    """The client's snapshots, for the calls that need them and for those that send the same bytes again. Thread-safe.

    Those that no call needs are kept as long as all together stay within `limit_bytes`; the oldest go first. A buffer
    whose content is here already is not copied again; one that was dropped is simply copied anew.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = default_limit() if limit_bytes is None else limit_bytes
        self._most = min(_STORED, file_limit() // 8)
        self._kept: OrderedDict[bytes, Blob] = OrderedDict()
        """Those that stay when their calls have ended, the last used last."""
        self._alive: dict[bytes, weakref.ref[Blob]] = {}
        """Beside those, the ones that calls need."""
        self._sizes: Counter[int] = Counter()
        self._bytes = 0
        """Of those that are alive."""
        self._lock = threading.RLock()  # a finalizer may come in anywhere

    def put(self, data: memoryview) -> Blob:
        """The blob with this content: the one that is here, or a new snapshot."""
        flat = data if data.ndim == 1 and data.format == "B" else data.cast("B")
        if self._sizes.get(flat.nbytes):  # hashing is a third of a copy's time, and wasted on a size never seen
            known = self._find(blob_digest(flat))
            if known is not None:
                return known
        made = Blob.snapshot(flat)
        interrupts.hold()
        try:
            with self._lock:
                return self._find(made.digest) or self._add(made)
        finally:
            interrupts.let_go()

    def _find(self, digest: bytes) -> Blob | None:
        with self._lock:
            known = self._alive.get(digest)
            blob = None if known is None else known()
            if blob is not None:
                self._keep(blob)
            return blob

    def _add(self, blob: Blob) -> Blob:
        digest, size, this = blob.digest, blob.size, weakref.ref(self)

        def forget(_: weakref.ref[Blob]) -> None:
            store = this()
            if store is not None:
                store._forget(digest, size)

        self._sizes[size] += 1
        self._bytes += size
        self._alive[digest] = weakref.ref(blob, forget)
        self._keep(blob)
        return blob

    def _keep(self, blob: Blob) -> None:
        self._kept[blob.digest] = blob
        self._kept.move_to_end(blob.digest)
        # Dropping one that a call needs frees nothing yet; then the next one goes too.
        while len(self._kept) > 1 and (self._bytes > self._limit or len(self._kept) > self._most):
            self._kept.popitem(last=False)

    def _forget(self, digest: bytes, size: int) -> None:
        """It is garbage: no call needs it, and it is not kept."""
        with self._lock:
            known = self._alive.get(digest)
            if known is not None and known() is None:
                del self._alive[digest]
            self._bytes -= size
            self._sizes[size] -= 1
            if not self._sizes[size]:
                del self._sizes[size]

    def clear(self) -> None:
        """Keep none beyond its calls."""
        with self._lock:
            self._kept.clear()
