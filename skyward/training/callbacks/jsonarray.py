"""A JSON array on the disk that grows by a record at a time, and is whole at every instant.

Whoever opens the file reads an array: also while a record is written, and after a SIGKILL at any instruction. Writing
into the file that readers see cannot promise that: a write that spans pages may end between them, and a reader that
asks twice, until nothing more comes, reads the old end and then the new. So there are two files. A record is written
to the one that nobody sees, which then takes the visible name by a rename. The other is a record behind; the next
write gives it both. That is two writes of a record's length, a link and a rename for each, however long the file is.

What follows the closing bracket is spaces up to a multiple of 4 KiB (whitespace to JSON), so that the size of a file
that somebody still reads hardly ever changes under him. `close` cuts them off.

A loss of power may tear the file all the same: nothing is fsynced but in `sync`. `salvage` reads what lies before the
tear. Where the file system has no hard links there is one file, written in place.
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["JsonArray", "is_being_written", "read_records", "salvage"]

_log = logging.getLogger(__name__)

_BLOCK = 4096
"""Files grow by so many bytes: a page, so that a record seldom needs two."""


class JsonArray:
    """The file at `path`, replaced by an array of `records`, and open for more. For one thread of one process.

    Raises: OSError where it cannot be written.
    """

    def __init__(self, path: Path, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.path = path
        lines = [encode(each) for each in records]
        self._count = len(lines)
        self._behind = b""
        _sweep(path)
        stem = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        self._seen = _File(Path(f"{stem}.a"), lines)
        self._hidden: _File | None = _File(Path(f"{stem}.b"), lines)
        self._link = Path(f"{stem}.c")
        self._publish(self._seen)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record; it is in the file, for every reader, when this returns.

        Raises: OSError (no space, for one): the file is as it was, and the record is not in it.
        """
        body = (b",\n" if self._count else b"\n") + encode(record)
        if self._hidden is None:
            self._seen.extend(body)
        else:
            self._add_hidden(self._hidden, self._behind + body)
            self._behind = body
        self._count += 1

    def sync(self) -> None:
        """Returns when the array, as it is, outlives a loss of power."""
        os.fsync(self._seen.fd)
        with contextlib.suppress(OSError):  # the name of a file system that cannot sync folders
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """Cuts the spaces off. Idempotent."""
        if self._seen.fd < 0:
            return
        self._seen.finish()
        self._seen.forget(keep=self._hidden is None)
        if self._hidden is not None:
            self._hidden.forget()

    def __del__(self) -> None:
        for each in (getattr(self, "_seen", None), getattr(self, "_hidden", None)):
            if each is not None and each.fd >= 0:
                os.close(each.fd)

    def _add_hidden(self, hidden: _File, body: bytes) -> None:
        tail, seen = hidden.tail, self._seen
        hidden.extend(body)
        self._seen, self._hidden = hidden, seen
        try:
            self._publish(hidden)
        except OSError:
            self._seen, self._hidden = seen, hidden
            hidden.cut(tail)
            raise

    def _publish(self, file: _File) -> None:
        """Gives the visible name to `file`, which keeps its own."""
        try:
            os.link(file.path, self._link)
        except OSError as error:
            self._go_on_in_place(file, error)
        else:
            os.replace(self._link, self.path)

    def _go_on_in_place(self, file: _File, error: OSError) -> None:
        _log.warning("%s: no hard links there (%s); it is written in place, without a second file", self.path, error)
        os.replace(file.path, self.path)
        file.path = self.path
        if self._hidden is not None:
            self._hidden.forget()
            self._hidden = None


class _File:
    """One of the two: `tail` is where the next record goes, over the end of the array."""

    def __init__(self, path: Path, lines: list[bytes]) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer lives. Not flock: forked workers have that
        self.tail = self.size = 0
        self.extend(b"[" + b",".join(b"\n" + each for each in lines))

    def extend(self, body: bytes) -> None:
        data = body + b"\n]"
        end = self.tail + len(data)
        if end > self.size:
            size = -(-end // _BLOCK) * _BLOCK
            data = data.ljust(size - self.tail)
        else:
            size = self.size
        try:
            _write_at(self.fd, data, self.tail)
        except OSError:
            if self.tail:
                self.cut(self.tail)
            raise
        self.size, self.tail = size, self.tail + len(body)

    def finish(self) -> None:
        _write_at(self.fd, b"\n]\n", self.tail)
        os.ftruncate(self.fd, self.tail + 3)

    def forget(self, *, keep: bool = False) -> None:
        """Ends the use of it, and its own name."""
        if not keep:
            self.path.unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = -1

    def cut(self, tail: int) -> None:
        """Takes back what stands behind `tail`, or half stands there. These bytes were on the disk: needs no space."""
        _write_at(self.fd, b"\n]", tail)
        self.tail, self.size = tail, tail + 2
        os.ftruncate(self.fd, self.size)


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _files_of(path: Path) -> list[Path]:
    return [each for each in path.parent.glob(f".{path.name}.*") if each.suffix in {".a", ".b", ".c"}]


def _has_writer(file: Path) -> bool:
    """Whether another process that made one of the hidden files still lives, on whichever machine."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
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
    return any(_has_writer(each) for each in _files_of(path))


def _sweep(path: Path) -> None:
    """Removes what a writer that was killed has left beside its file."""
    for each in _files_of(path):
        if not _has_writer(each):
            each.unlink(missing_ok=True)


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
        except ValueError:
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
    except (ValueError, TypeError):
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
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_finite(each) for each in value]
    if value is None or isinstance(value, str | int):
        return value
    return _plain(value)
