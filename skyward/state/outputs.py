"""Output of pools, kept for `skyward logs`: one bounded file per pool, readable only by this user.

Each line is `seconds.milliseconds stream text`, such as `1795281234.512 o [node 0 rank 1] epoch 3`. The stream is `o`
for stdout or `e` for stderr.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from ..core.ownership import make_private_folder
from ..core.records import dataclass
from ..errors import UsageError
from ..values.machine import LogLine
from .journal import state_folder

_LIMIT_BYTES = 8 << 20
"""Largest size of a file. A full file is renamed and a new one begins; two are kept."""
_KEPT = 20
"""Number of pools whose output is kept; the oldest is removed."""
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class OutputLine:
    """One line of output. `at`: its arrival here, in seconds since the epoch."""

    at: float
    is_error: bool
    text: str


class OutputFile:
    """LogSink that writes to a file, created with the first line. Thread-safe; drops lines that it cannot write."""

    def __init__(self, pool: str, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._path = _path(pool)
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0
        self._is_broken = False

    def __call__(self, line: LogLine) -> None:
        rank = "" if line.rank is None else f" rank {line.rank}"
        stream = "o" if line.stream == "stdout" else "e"
        data = f"{time.time():.3f} {stream} [node {line.node}{rank}] {line.text}\n".encode(errors="replace")
        with self._lock:
            if self._is_broken:
                return
            try:
                self._write(data)
            except (OSError, UsageError):  # a full disk or a read-only home must not fail the calls
                self._is_broken = True
                self._close()

    def _write(self, data: bytes) -> None:
        if self._fd < 0:
            self._open()
        elif self._size + len(data) > self._limit:
            self._close()
            os.replace(self._path, f"{self._path}.1")
            self._open()
        self._size += os.write(self._fd, data)

    def _open(self) -> None:
        folder = os.path.dirname(self._path)
        make_private_folder(folder)
        _drop_oldest(folder)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the file. Idempotent; a later line opens it again."""
        with self._lock:
            self._close()


def outputs() -> list[str]:
    """Return the pools whose output is kept, oldest first."""
    folder = os.path.join(state_folder(), "logs")
    return [name.removesuffix(".log") for name in _by_age(folder) if name.endswith(".log")]


def read_output(
    pool: str, *, tail: int | None = None, follow_while: Callable[[], bool] | None = None
) -> Iterator[OutputLine]:
    """Yield the kept output of a pool's calls.

    Args:
        pool: Full name of the pool; see `outputs`, and `skyward.state.live.find` for labels.
        tail: Number of last lines to start with; None for all.
        follow_while: Then wait for more lines, like `tail -F`, while this returns True. It is called when no line is
            left.

    Raises:
        UsageError: No output of the pool is kept, and `follow_while` is None.
    """
    path = _path(pool)
    fd = _opened(path)
    if fd < 0 and follow_while is None:
        known = ", ".join(outputs())
        advice = f"use one of {known}" if known else "run a pool first, because no output is kept yet"
        raise UsageError(f"pool {pool!r}: no output is kept here; {advice}")
    rest = b""
    try:
        lines = _lines_of(f"{path}.1")
        while data := _read(fd):
            lines += (rest + data).split(b"\n")
            rest = lines.pop()
        yield from _parsed(lines if tail is None else lines[max(0, len(lines) - tail) :])
        while follow_while is not None:
            # The check for a new file comes first, so that the rest of the old one is read completely before it.
            newer = _replacement(path, fd)
            while data := _read(fd):
                *lines, rest = (rest + data).split(b"\n")
                yield from _parsed(lines)
            if newer >= 0:
                if fd >= 0:
                    os.close(fd)
                fd = newer
            elif follow_while():
                time.sleep(_LOOK_S)
            else:
                return
    finally:
        if fd >= 0:
            os.close(fd)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def _read(fd: int) -> bytes:
    return os.read(fd, 1 << 16) if fd >= 0 else b""


def _replacement(path: str, fd: int) -> int:
    """Open the file that now has this path, if it is a new one; otherwise return -1."""
    try:
        if fd >= 0 and os.stat(path).st_ino == os.fstat(fd).st_ino:
            return -1
    except FileNotFoundError:
        return -1
    return _opened(path)


def _lines_of(path: str) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # removed meanwhile
        return file.read().split(b"\n")[:-1]
    return []


def _parsed(lines: list[bytes]) -> Iterator[OutputLine]:
    for line in lines:
        with contextlib.suppress(ValueError):  # half a line from a program that was killed while writing
            at, stream, text = line.decode(errors="replace").split(" ", 2)
            yield OutputLine(at=float(at), is_error=stream == "e", text=text)


def _drop_oldest(folder: str) -> None:
    names = [name for name in _by_age(folder) if name.endswith(".log")]
    for name in names[: max(0, len(names) - _KEPT + 1)]:
        for ending in ("", ".1"):
            with contextlib.suppress(OSError):  # another process removed it
                os.unlink(os.path.join(folder, name + ending))


def _by_age(folder: str) -> list[str]:
    aged = []
    with contextlib.suppress(OSError):  # no folder, so nothing is kept
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # removed meanwhile
                aged.append((entry.stat().st_mtime, entry.name))
    return [name for _, name in sorted(aged)]


def _path(pool: str) -> str:
    return os.path.join(state_folder(), "logs", f"{pool}.log")
