"""Spool of a run: the folder that holds its records until a hub has them. Without a hub, the folder is the run.

    <spool>/<run id>/<start>-<client>.records      lines that one process wrote, see `records`
    <spool>/<run id>/<start>-<client>.sent         number and offset of the last acknowledged record
    <spool>/<run id>/files/<sha256>                bytes of artifacts

Each process has a file of its own, so ranks, forked workers and a resumed run never write into each other's lines. A
process appends each record by one `write`, so whatever it wrote survives its `kill -9`. It holds a lock on its file.
The file of a dead process has no lock, so another process may send its rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .records import checked_lines, line_of

_log = logging.getLogger(__name__)

_HELD_LINES = 500_000
"""Records that wait in memory while the disk is full. Further ones are lost, and counted."""
_PIECE = 1 << 20
_NAME = re.compile(r"(\d+)-([0-9a-f]{32})\.records")
_READ_LIMIT = 64 << 20
"""Longest record that a reader looks for, in bytes."""


class SpoolWriter:
    """Records of this process for one run. Thread-safe; `append` never waits for the network and never raises.

    Args:
        folder: the run's folder; created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.client = uuid.uuid4().hex
        self.path = folder / f"{time.time_ns() // 1_000_000:013d}-{self.client}.records"
        self.size = 0
        """Bytes in the file."""
        self.lost = 0
        self._held: deque[bytes] = deque()
        # Reentrant: a signal handler may log while its thread is within `append`.
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The file gets its name when it has its lock: another process would take a file without one for a dead
        # process's, send it and remove it.
        new = self.path.with_suffix(".new")
        self._descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: nobody else sends this file
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self.path)

    def append(self, lines: bytes) -> None:
        """Add whole lines by one write. If the disk is full, keep them in memory until there is space again."""
        with self._lock:
            if self._held or not self._write(lines):
                for line in lines.splitlines(keepends=True):
                    self._hold(line)
                self.flush()

    def flush(self) -> None:
        """Try to write the lines that a full disk held back."""
        with self._lock:
            while self._held and self._write(self._held[0]):
                self._held.popleft()
                if not self._held:
                    _log.info("%s: the lines that were held back are written", self.path)

    @property
    def held(self) -> int:
        """Number of records that are not in the file yet."""
        return len(self._held)

    def close(self) -> None:
        """Close the file, which lets other processes send its rest. Idempotent."""
        with self._lock:
            self.flush()
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def forget(self) -> None:
        """Close this process's copy of the descriptor, in a forked child. The parent keeps its own, and the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _hold(self, line: bytes) -> None:
        if len(self._held) >= _HELD_LINES:
            self.lost += 1
        else:
            self._held.append(line)

    def _write(self, lines: bytes) -> bool:
        if self._descriptor < 0:
            return False
        try:
            written = os.write(self._descriptor, lines)
            if written == len(lines):
                self.size += written
                return True
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as failure:
            error = failure
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self.size)  # a part of the lines may be in the file
        if not self._held:
            _log.warning("%s: cannot be written (%s); records wait in memory", self.path, error.strerror)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolBatch:
    """Consecutive records of one log.

    Attributes:
        first: number of the first record; the first of a log is 1.
        records: the records' JSON.
        ends: offset in the file behind each record.
    """

    first: int
    records: list[bytes]
    ends: list[int]

    @property
    def last(self) -> int:
        return self.first + len(self.records) - 1

    @property
    def end(self) -> int:
        return self.ends[-1]

    def halves(self) -> tuple[SpoolBatch, SpoolBatch]:
        """Split a batch with two or more records."""
        return self.split(len(self.records) // 2)

    def before_files(self) -> int:
        """Return the number of records before the first artifact; 0 if there is none."""
        found = (at for at, record in enumerate(self.records) if record.startswith(b'["a",'))
        return next(found, 0)

    def split(self, middle: int) -> tuple[SpoolBatch, SpoolBatch]:
        """Split a batch into its first records and the rest."""
        return (
            SpoolBatch(first=self.first, records=self.records[:middle], ends=self.ends[:middle]),
            SpoolBatch(first=self.first + middle, records=self.records[middle:], ends=self.ends[middle:]),
        )

    def files(self) -> list[str]:
        """Return the SHA-256 of each artifact in the batch."""
        found = [json.loads(record)[3] for record in self.records if record.startswith(b'["a",')]
        return list(dict.fromkeys(found))


class SpoolLog:
    """Records of one process as their sender sees them. Use it from one thread.

    Args:
        path: the `.records` file.
    """

    def __init__(self, path: Path) -> None:
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"path={os.fspath(path)!r}: is not a file of records; pass one of `logs_in`")
        self.path = path
        self.client = match[2]
        self._sent = path.with_suffix(".sent")
        self.number, self.offset = self._acknowledged()
        self._file = path.open("rb")

    def read(self, limit: int, *, records: int = 10_000) -> SpoolBatch | None:
        """Return the next records that are not acknowledged, up to about `limit` bytes. None: there is none."""
        data = os.pread(self._file.fileno(), limit, self.offset)
        while data and b"\n" not in data and len(data) == limit < _READ_LIMIT:  # one record is longer than that
            limit *= 4
            data = os.pread(self._file.fileno(), limit, self.offset)
        batch: list[bytes] = []
        ends: list[int] = []
        end = 0
        for text, following in checked_lines(data):
            end = following
            if text is None:
                _log.warning("%s: skipped a damaged line before offset %d", self.path, self.offset + end)
                continue
            batch.append(text)
            ends.append(self.offset + end)
            if len(batch) >= records:
                break
        if not batch:
            self.offset += end
            return None
        return SpoolBatch(first=self.number + 1, records=batch, ends=ends)

    def acknowledge(self, number: int, offset: int) -> None:
        """Note that the hub has all records up to a number, which ends at an offset."""
        self.number, self.offset = number, offset
        temporary = self._sent.with_suffix(".sent-new")
        # A full disk must not stop the sender: it only sends these records again after a restart.
        with contextlib.suppress(OSError):
            temporary.write_bytes(line_of([number, offset]))
            temporary.replace(self._sent)

    def rewind(self, number: int) -> None:
        """Go back to the records behind a number, because the hub has no more than that."""
        self.number = self.offset = 0
        while self.number < number and (batch := self.read(_PIECE)) is not None:
            skipped = min(len(batch.records), number - self.number)
            self.number, self.offset = self.number + skipped, batch.ends[skipped - 1]

    @property
    def unsent(self) -> int:
        """Number of intact records that are not acknowledged."""
        data = os.pread(self._file.fileno(), max(0, self._size() - self.offset), self.offset)
        return sum(text is not None for text, _ in checked_lines(data))

    @property
    def unsent_bytes(self) -> int:
        return max(0, self._size() - self.offset)

    def try_lock(self) -> bool:
        """Lock the file if its writer is gone, until `close`."""
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in {errno.EWOULDBLOCK, errno.EACCES}
        return True

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Delete the log, whose records the hub has."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._sent.unlink(missing_ok=True)

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _acknowledged(self) -> tuple[int, int]:
        with contextlib.suppress(OSError):
            for text, _ in checked_lines(self._sent.read_bytes()):
                if text is not None:
                    number, offset = (int(part) for part in text.strip(b"[]").split(b","))
                    return number, offset
        return 0, 0


def logs_in(folder: Path) -> list[Path]:
    """Return the files of records in a run's folder, the oldest process first."""
    with contextlib.suppress(OSError):
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return []


def store_file(folder: Path, source: str | os.PathLike[str]) -> tuple[str, int]:
    """Copy a file into a run's folder under the name of its content.

    Returns:
        SHA-256 in hexadecimal, and size in bytes.

    Raises:
        OSError: the file cannot be read, or the disk is full.
    """
    with open(source, "rb") as file:
        return _store(folder, lambda: file.read(_PIECE))


def store_bytes(folder: Path, data: bytes) -> tuple[str, int]:
    """Write bytes into a run's folder under the name of their content; see `store_file`."""
    pieces = iter((data, b""))
    return _store(folder, lambda: next(pieces))


def _store(folder: Path, read: Callable[[], bytes]) -> tuple[str, int]:
    files = folder / "files"
    files.mkdir(parents=True, exist_ok=True)
    unfinished = files / f".{uuid.uuid4().hex}"
    digest, size = hashlib.sha256(), 0
    try:
        with unfinished.open("wb") as target:
            while piece := read():
                digest.update(piece)
                target.write(piece)
                size += len(piece)
        unfinished.replace(files / digest.hexdigest())
    finally:
        unfinished.unlink(missing_ok=True)
    return digest.hexdigest(), size
