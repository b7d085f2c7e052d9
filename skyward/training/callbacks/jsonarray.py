"""A JSON array on disk that grows by one record at a time and is complete at every instant.

A reader that opens the file always gets an array: during a write, and after a SIGKILL at any instruction. Writing to
the visible file cannot promise that. A write that spans pages may stop between them, and a reader that reads in pieces
may get the old end first and the new one after it.

So there are two files. A record goes to the hidden one, which then takes the visible name by a rename. The other file
now lacks that record; the next write adds it together with its own. A record costs a read, a write, a link and a
rename of its own length, however long the file is.

A reader may still have the former visible file open. Linux can tell (it refuses a lease on a file that another process
has open): the file is then left alone and a third one is made, so readers keep the array as they opened it. On other
systems a reader that takes longer than the time between two records may see a half-written end. On a file system
without hard links there is one file, written in place.

Cheaper ways do not keep the promise:

- One `pwrite` of record and bracket to the visible file: a kill may end it between two pages. Of 1,380 `json.load`
  beside such a writer, with records of 150 bytes, 54 failed (Linux 2026-11-22), because readers read in pieces.
- A new file for each record costs the whole length each time.
- JSON Lines would need none of this, but existing readers of these logs expect an array.

A power failure may still tear the file, because only `sync` calls fsync. `salvage` reads the records before the tear.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import secrets
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_MOST_FILES = 8
"""Most hidden files. If readers hold all of them, the one that was visible longest ago is reused."""

_CHUNK = 1 << 20


class JsonArray:
    """Replace the file at `path` by an array of `records` and keep it open for more.

    Use it from one thread of one process.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.path = path
        lines = [encode(record) for record in records]
        self._is_empty = not lines
        _sweep(path)
        self._stem = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        self._made = 0
        self._hidden: list[_File] = []
        self._in_place = False
        self._seen = self._new_file()
        self._seen.write(b"[" + b",".join(b"\n" + line for line in lines))
        self._publish(self._seen)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record; every reader sees it when this returns.

        Raises:
            OSError: no space, for example. The file is unchanged and the record is not in it.
        """
        body = (b"\n" if self._is_empty else b",\n") + encode(record)
        if self._in_place:
            self._seen.write(body)
        else:
            self._write_unseen(body)
        self._is_empty = False

    def sync(self) -> None:
        """Return when the array, as it is now, survives a power failure."""
        os.fsync(self._seen.fd)
        with contextlib.suppress(OSError):  # file systems that cannot sync a folder
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """Close the files and remove the hidden ones. Idempotent."""
        if self._seen.fd >= 0:
            self._seen.forget(keep=self._in_place)
        while self._hidden:
            self._hidden.pop().forget()

    def __del__(self) -> None:
        for file in (*getattr(self, "_hidden", ()), getattr(self, "_seen", None)):
            if file is not None and file.fd >= 0:
                os.close(file.fd)

    def _write_unseen(self, body: bytes) -> None:
        file = self._unread_file()
        tail = file.tail
        file.write(self._seen.body(tail) + body)
        try:
            self._publish(file)
        except OSError:
            file.cut(tail)  # a later append must not publish a record that was reported as failed
            raise
        if file in self._hidden:
            self._hidden.remove(file)
            self._hidden.append(self._seen)
        self._seen = file

    def _unread_file(self) -> _File:
        """Return a hidden file that no reader has open; the first one was visible longest ago."""
        for file in self._hidden:
            if not file.is_read():
                return file
        if len(self._hidden) >= _MOST_FILES:
            return self._hidden[0]
        new = self._new_file()
        self._hidden.append(new)
        while new.tail < self._seen.tail:
            new.write(self._seen.body(new.tail, _CHUNK), end=b"")
        return new

    def _new_file(self) -> _File:
        self._made += 1
        return _File(Path(f"{self._stem}.{self._made}"))

    def _publish(self, file: _File) -> None:
        """Give `file` the visible name; a hard link lets it keep its hidden name."""
        link = Path(f"{self._stem}.0")
        try:
            os.link(file.path, link)
        except OSError as error:
            _log.warning("%s: no hard links there (%s); it is written in place", self.path, error)
            os.replace(file.path, self.path)
            file.path, self._in_place = self.path, True
        else:
            os.replace(link, self.path)


class _File:
    """One of the files; `tail` is the offset of the next record, which overwrites the array's end."""

    def __init__(self, path: Path) -> None:
        self.path, self.tail = path, 0
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            # The lock shows that the writer is alive. Forked workers would inherit a flock, so it is a POSIX lock.
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if hasattr(fcntl, "F_SETLEASE"):
            # Opening a leased file signals its holder, by default with SIGIO, which ends a process. SIGURG does not.
            fcntl.fcntl(self.fd, fcntl.F_SETSIG, signal.SIGURG)

    def is_read(self) -> bool:
        """Return whether another process has the file open; False where the system cannot tell."""
        if not hasattr(fcntl, "F_SETLEASE"):
            return False
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def body(self, start: int, most: int | None = None) -> bytes:
        """Return the bytes from `start` on, without the array's end."""
        count = self.tail - start
        return os.pread(self.fd, count if most is None else min(count, most), start)

    def write(self, body: bytes, end: bytes = b"\n]\n") -> None:
        try:
            _write_at(self.fd, body + end, self.tail)
        except OSError:
            self.cut(self.tail)
            raise
        self.tail += len(body)

    def cut(self, tail: int) -> None:
        """Remove everything behind `tail`, also a half-written record. Needs no space: these bytes were on disk."""
        if tail:
            _write_at(self.fd, b"\n]\n", tail)
        os.ftruncate(self.fd, tail and tail + 3)
        self.tail = tail

    def forget(self, *, keep: bool = False) -> None:
        """Close the file and remove its hidden name."""
        if not keep:
            self.path.unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = -1


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _files_of(path: Path) -> list[Path]:
    return [file for file in path.parent.glob(f".{path.name}.*") if file.suffix[1:].isdecimal()]


def _has_writer(file: Path) -> bool:
    """Return whether another process that made this hidden file is alive, also on another machine."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its writer removed it meanwhile
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in {errno.EACCES, errno.EAGAIN}
    finally:
        os.close(fd)
    return False


def is_being_written(path: Path) -> bool:
    """Return whether another process has a JsonArray open at `path`."""
    return any(_has_writer(file) for file in _files_of(path))


def _sweep(path: Path) -> None:
    """Remove hidden files that a killed writer left behind."""
    for file in _files_of(path):
        if not _has_writer(file):
            file.unlink(missing_ok=True)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the array's records.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not an array of objects.
    """
    records = json.loads(path.read_bytes())
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path}: not a JSON array of objects; read it with salvage(), or remove it")
    return records


def salvage(path: Path) -> list[dict[str, Any]]:
    """Return the complete records at the beginning of a damaged file; each record is one line."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines():
        text = line.strip().removeprefix("[").removesuffix(",")
        if not text:
            continue
        try:
            record = json.loads(text)
        except ValueError:  # the damage begins here
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def encode(record: Mapping[str, Any]) -> bytes:
    """Return the record as one line of JSON.

    Tensors and numpy values become numbers and lists. NaN and infinity, which JSON lacks, become null. Any other value
    becomes its `str`.
    """
    try:
        return json.dumps(record, allow_nan=False, default=_plain).encode()
    except (ValueError, TypeError):  # NaN, or a key that is not a string: convert everything and try again
        return json.dumps(_finite(record), allow_nan=False).encode()


def _plain(value: object) -> Any:
    """Convert a value that `json` cannot encode."""
    as_list = getattr(value, "tolist", None)  # tensors, arrays and numpy's scalars
    if callable(as_list):
        return _finite(as_list())
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return _plain(value)
