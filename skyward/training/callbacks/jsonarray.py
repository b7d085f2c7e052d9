"""A JSON array on the disk that grows by a record at a time, and is whole at every instant.

Whoever opens the file reads an array: also while a record is written, and after a SIGKILL at any instruction. Writing
into the file that readers see cannot promise that: a write that spans pages may end between them, and a reader that
asks until nothing more comes may get the old end and then the new. So there are two files. A record is written to the
one that nobody sees, which then takes the visible name by a rename; the other has missed a record, which the next write
gives it too. A record costs a read, a write, a link and a rename of its own length, however long the file is.

A reader may still hold the file that was visible when he came. Where Linux can tell (a lease on a file that somebody
else has open is refused), it is left alone, and a third one is made: readers get the array as it was when they opened
it. Elsewhere, one who reads for longer than from one record to the next may meet an end that is half written. Where
the file system has no hard links there is one file, written in place.

Cheaper ways do not keep the promise. Record and bracket in one `pwrite` to the visible file: a kill may end it between
two pages, and of 1,380 `json.load` beside such a writer, with records of 150 bytes, 54 failed (Linux 2026-11-22): a
reader asks for the file in pieces. A new file for each record costs the whole length each time. JSON Lines would need
none of this, but whoever reads a log today reads an array.

A loss of power may tear the file all the same: nothing is fsynced but in `sync`. `salvage` reads what lies before the
tear.
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

__all__ = ["JsonArray", "is_being_written", "read_records", "salvage"]

_log = logging.getLogger(__name__)

_MOST_FILES = 8
"""With so many readers that hold one each, the one that was visible the longest time ago is written to."""

_CHUNK = 1 << 20


class JsonArray:
    """The file at `path`, replaced by an array of `records`, and open for more. For one thread of one process.

    Raises: OSError where it cannot be written.
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
        """Adds a record; it is in the file, for every reader, when this returns.

        Raises: OSError (no space, for one): the file is as it was, and the record is not in it.
        """
        body = (b"\n" if self._is_empty else b",\n") + encode(record)
        if self._in_place:
            self._seen.write(body)
        else:
            self._write_unseen(body)
        self._is_empty = False

    def sync(self) -> None:
        """Returns when the array, as it is, outlives a loss of power."""
        os.fsync(self._seen.fd)
        with contextlib.suppress(OSError):  # file systems that cannot sync a folder
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """Idempotent."""
        if self._seen.fd >= 0:
            self._seen.forget(keep=self._in_place)
        while self._hidden:
            self._hidden.pop().forget()

    def __del__(self) -> None:
        for each in (*getattr(self, "_hidden", ()), getattr(self, "_seen", None)):
            if each is not None and each.fd >= 0:
                os.close(each.fd)

    def _write_unseen(self, body: bytes) -> None:
        file = self._unread_file()
        tail = file.tail
        file.write(self._seen.body(tail) + body)
        try:
            self._publish(file)
        except OSError:
            file.cut(tail)
            raise
        if file in self._hidden:
            self._hidden.remove(file)
            self._hidden.append(self._seen)
        self._seen = file

    def _unread_file(self) -> _File:
        """One that nobody sees and nobody reads. Those at the front were visible the longest time ago."""
        for each in self._hidden:
            if not each.is_read():
                return each
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
        """Gives the visible name to `file`, which keeps its own."""
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
    """One of the files: `tail` is where the next record goes, over the end of the array."""

    def __init__(self, path: Path) -> None:
        self.path, self.tail = path, 0
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer lives. Not flock: forked workers have that
        if hasattr(fcntl, "F_SETLEASE"):
            # Whoever opens a leased file makes a signal, SIGIO unless told otherwise, which ends a process.
            fcntl.fcntl(self.fd, fcntl.F_SETSIG, signal.SIGURG)

    def is_read(self) -> bool:
        """Whether somebody else has it open. False where there is no telling."""
        if not hasattr(fcntl, "F_SETLEASE"):
            return False
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def body(self, start: int, most: int | None = None) -> bytes:
        """What stands from `start` on, without the end of the array."""
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
        """Takes back what stands behind `tail`, or half stands there. These bytes were on the disk: needs no space."""
        if tail:
            _write_at(self.fd, b"\n]\n", tail)
        os.ftruncate(self.fd, tail and tail + 3)
        self.tail = tail

    def forget(self, *, keep: bool = False) -> None:
        """Ends the use of it, and its own name."""
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
    return [each for each in path.parent.glob(f".{path.name}.*") if each.suffix[1:].isdecimal()]


def _has_writer(file: Path) -> bool:
    """Whether another process that made one of the hidden files still lives, on whichever machine."""
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
    """Whether another process has a JsonArray open there."""
    return any(_has_writer(file) for file in _files_of(path))


def _sweep(path: Path) -> None:
    """Removes what a writer that was killed has left beside its file."""
    for file in _files_of(path):
        if not _has_writer(file):
            file.unlink(missing_ok=True)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The array's records. Raises: OSError; ValueError where the file is no array of objects."""
    found = json.loads(path.read_bytes())
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{path}: not a JSON array of objects")
    return found


def salvage(path: Path) -> list[dict[str, Any]]:
    """The records that stand whole at the beginning of a damaged file, a record being a line."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines():
        text = line.strip().removeprefix("[").removesuffix(",")
        if not text:
            continue
        try:
            record = json.loads(text)
        except ValueError:  # here the damage begins
            break
        if not isinstance(record, dict):
            break
        found.append(record)
    return found


def encode(record: Mapping[str, Any]) -> bytes:
    """The record as one line of JSON. Tensors and numpy's values become numbers and lists; NaN and infinities, which
    JSON has not, null; anything else its text.
    """
    try:
        return json.dumps(record, allow_nan=False, default=_plain).encode()
    except (ValueError, TypeError):  # NaN, or a key that is no text: convert what json.dumps refused
        return json.dumps(_finite(record), allow_nan=False).encode()


def _plain(value: object) -> Any:
    """For what json does not know."""
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
