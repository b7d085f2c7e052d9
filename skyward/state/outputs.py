"""What the calls of a pool printed, kept for `skyward logs`: a file for each pool, bounded, this user's alone.

A line of it is `seconds.milliseconds stream text`: `1795281234.512 o [node 0 rank 1] epoch 3`. The stream is `o` or
`e`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..core.ownership import make_private_folder
from ..errors import UsageError
from ..values.machine import LogLine
from .journal import state_folder

__all__ = ["OutputFile", "OutputLine", "outputs", "read_output"]

_LIMIT_BYTES = 8 << 20
"""Of one file; then it becomes the older one of two."""
_KEPT = 20
"""Pools whose output is kept; that of the oldest is removed."""
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class OutputLine:
    """`at`: when it came here, in seconds since the epoch."""

    at: float
    is_error: bool
    text: str


class OutputFile:
    """A LogSink. The file is made with the first line. Thread-safe; what cannot be written is not kept."""

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
            except (OSError, UsageError):  # a full disk, a home that cannot be written: output must not end the calls
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
        """Idempotent; a line that comes later opens the file again."""
        with self._lock:
            self._close()


def outputs() -> list[str]:
    """The pools whose output is kept, oldest first."""
    folder = os.path.join(state_folder(), "logs")
    return [name.removesuffix(".log") for name in _by_age(folder) if name.endswith(".log")]


def read_output(
    pool: str, *, tail: int | None = None, follow_while: Callable[[], bool] | None = None
) -> Iterator[OutputLine]:
    """What calls of the pool printed, as far as it is kept.

    Args:
        pool: its full name; see `skyward.state.live.find` for labels, and `outputs`.
        tail: of what is there now only so many of the last lines.
        follow_while: then wait for more, as `tail -F` does, while this says True; it is asked when there is nothing.

    Raises UsageError when nothing of such a pool is kept and none is waited for.
    """
    path = _path(pool)
    fd = _opened(path)
    if fd < 0 and follow_while is None:
        raise UsageError(f"nothing that pool {pool!r} printed is kept here; there: {', '.join(outputs()) or 'nothing'}")
    rest = b""
    try:
        lines = _lines_of(f"{path}.1")
        while data := _read(fd):
            lines += (rest + data).split(b"\n")
            rest = lines.pop()
        yield from _parsed(lines if tail is None else lines[max(0, len(lines) - tail) :])
        while follow_while is not None:
            newer = _replacement(path, fd)  # looked for first: what came to the old one before is read first
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
    """The file that stands there now, if it is another one; else -1."""
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
        with contextlib.suppress(ValueError):  # half a line, of a program that was killed while it wrote
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
    with contextlib.suppress(OSError):  # no such folder: nothing was kept
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # removed meanwhile
                aged.append((entry.stat().st_mtime, entry.name))
    return [name for _, name in sorted(aged)]


def _path(pool: str) -> str:
    return os.path.join(state_folder(), "logs", f"{pool}.log")
