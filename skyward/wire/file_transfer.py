"""Transfer of files over a pair of byte streams. Either end may send; the other one receives.

    | length u32 | JSON |    messages in both directions; a message with "piece" is followed by that many bytes

The sender lists its files. The receiver answers with digests of those that it has, whole or in part, and the sender
sends only the rest. So a repeated transfer continues where it stopped. A file gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Self

import xxhash

from .file_tree import PART_ENDING, Entry, FileRefused, Kind, Ways, check_names, part_of, place

GREETING = b"\0skyward-files-1\n"
"""First bytes of the node's end. A login shell may print anything ahead of them."""
_PIECE = 256 * 1024
_LEAST_KEPT = 2**20
"""Bytes from which an incomplete file is kept for the next attempt."""
_LONGEST_MESSAGE = 2**30
_LENGTH = struct.Struct("<I")
_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


class PeerRefused(Exception):
    """The other end gave the transfer up, and said why."""


class FileStream:
    """Messages and pieces of files, over two byte streams. Raises EOFError once the other end is gone."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader = reader
        self._writer = writer

    def greet(self) -> None:
        self._writer.write(GREETING)
        self._writer.flush()

    def wait_for_greeting(self) -> None:
        """Skip everything that a login shell printed."""
        seen = b""
        while not seen.endswith(GREETING):
            byte = self._reader.read(1)
            if not byte:
                raise EOFError("the other end is gone")
            seen = seen[-len(GREETING) :] + byte

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode("utf-8", "surrogateescape")
        self._write(_LENGTH.pack(len(data)) + data)

    def send_piece(self, piece: bytes) -> None:
        self.send({"piece": len(piece)})
        self._write(piece)

    def flush(self) -> None:
        with self._other_end():
            self._writer.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises PeerRefused if it is a refusal."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > _LONGEST_MESSAGE:
            raise EOFError("the other end sent something else")
        message: dict[str, Any] = json.loads(self.read(length).decode("utf-8", "surrogateescape"))
        if "refused" in message:
            raise PeerRefused(message["refused"])
        return message

    def read(self, size: int) -> bytes:
        data = self._reader.read(size)
        if len(data) < size:
            raise EOFError("the other end is gone")
        return data

    def refuse(self, reason: str) -> None:
        with contextlib.suppress(EOFError):  # nobody is left to be told
            self.send({"refused": reason})
            self.flush()

    def _write(self, data: bytes) -> None:
        with self._other_end():
            self._writer.write(data)

    @contextlib.contextmanager
    def _other_end(self) -> Iterator[None]:
        try:
            yield
        except (BrokenPipeError, ConnectionResetError):
            self._read_refusal()
            raise EOFError("the other end is gone") from None

    def _read_refusal(self) -> None:
        """Look for the reason why the other end stopped reading."""
        with contextlib.suppress(EOFError):
            while True:
                self.receive()


def _tell_nobody(*_: int) -> None:
    pass


# Sending ------------------------------------------------------------------------------------------------------------


def send_files(
    stream: FileStream,
    entries: Sequence[Entry],
    progress: Callable[[int], None] = _tell_nobody,
    tick: Callable[[], None] = _tell_nobody,
) -> dict[str, int]:
    """Send what the receiver lacks, and return what it counted.

    Args:
        stream: The receiver.
        entries: Files and folders.
        progress: Called with the bytes that are done, whether they were sent or already there.
        tick: Called while files are compared, which may take minutes. It raises to end the transfer.

    Raises:
        FileRefused: A file changed while it was read.
        PeerRefused: The receiver gave up.
        EOFError: The receiver is gone.
        OSError: A file cannot be read.
    """
    stream.send({"entries": [[entry.name, entry.size, entry.mode] for entry in entries]})
    stream.flush()
    has: dict[str, list[list[Any]]] = stream.receive()["has"]
    for index, entry in enumerate(entries):
        if not entry.is_folder:
            _send_file(stream, index, entry, has.get(str(index), []), progress, tick)
    stream.send({"done": True})
    stream.flush()
    counts: dict[str, int] = stream.receive()["counts"]
    return counts


def _send_file(
    stream: FileStream,
    index: int,
    entry: Entry,
    has: list[list[Any]],
    progress: Callable[[int], None],
    tick: Callable[[], None],
) -> None:
    with open(os.open(entry.source, os.O_RDONLY | _NO_FOLLOW), "rb") as file:
        offset = 0
        for length, digest, is_part in has:
            if length <= entry.size and digest_of(file, length, tick) == digest:
                if not is_part:
                    stream.send({"keep": index})
                    progress(entry.size)
                    return
                offset = length
        file.seek(offset)
        progress(offset)
        stream.send({"file": index, "offset": offset})
        sent = offset
        while piece := file.read(min(_PIECE, entry.size - sent)):
            stream.send_piece(piece)
            progress(len(piece))
            sent += len(piece)
        if sent < entry.size:
            raise FileRefused(f"{entry.source} became shorter while it was read; try again")
        stream.send({"end": index})


def digest_of(file: BinaryIO, length: int, tick: Callable[[], None]) -> str:
    """Return the digest of the first bytes of a file; empty if it has fewer. `tick` is called often, and may raise."""
    file.seek(0)
    hasher = xxhash.xxh3_128()
    left = length
    while left and (piece := file.read(min(_PIECE, left))):
        hasher.update(piece)
        left -= len(piece)
        tick()
    return "" if left else hasher.hexdigest()


# Receiving ----------------------------------------------------------------------------------------------------------


def receive_files(
    stream: FileStream,
    into: str,
    kind: Kind,
    cwd: str,
    progress: Callable[[int, int], None] = _tell_nobody,
    tick: Callable[[], None] = _tell_nobody,
) -> dict[str, int]:
    """Receive files, and return the numbers of `files`, `copied` files and copied `bytes`.

    Args:
        stream: The sender.
        into: Where the files go; see `place`.
        kind: Kind of the selection.
        cwd: Folder of relative paths.
        progress: Called with the bytes that are done, and with the bytes of all files.
        tick: Called while files are compared, which may take minutes. It raises to end the transfer.

    Raises:
        FileRefused: A name or a place is not acceptable.
        PeerRefused: The sender gave up.
        EOFError: The sender is gone.
        OSError: A file cannot be written.
    """
    listed = [Entry(name=name, size=size, mode=mode & 0o777) for name, size, mode in stream.receive()["entries"]]
    check_names(listed)
    root, entries = place(into, kind, listed, cwd)
    with _Receiver(root, entries) as receiver:
        stream.send({"has": receiver.has(tick)})
        stream.flush()
        total = sum(max(0, entry.size) for entry in entries)
        while "done" not in (message := stream.receive()):
            if "keep" in message:
                progress(receiver.keep(message["keep"]), total)
            elif "file" in message:
                progress(receiver.begin(message["file"], message["offset"]), total)
            elif "piece" in message:
                progress(receiver.write(stream.read(min(message["piece"], _PIECE))), total)
            else:
                receiver.end(message["end"])
        receiver.set_folder_modes()
        stream.send({"counts": receiver.counts})
        stream.flush()
        return receiver.counts


class _Receiver:
    """Files on their way into a folder. Leaving the block removes incomplete files, except long ones."""

    def __init__(self, root: str, entries: Sequence[Entry]) -> None:
        self._ways = Ways(root)
        self._entries = entries
        self._targets = [self._ways.target(entry) for entry in entries]
        self._parts: dict[int, int] = {}
        """Open incomplete files by their entry."""
        self._names: dict[int, str] = {}
        self._file = -1
        """Entry that is being received."""
        self.counts = {"files": sum(not entry.is_folder for entry in entries), "copied": 0, "bytes": 0}
        os.makedirs(root, exist_ok=True)
        for entry, path in zip(entries, self._targets, strict=True):
            os.makedirs(path if entry.is_folder else os.path.dirname(path), exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for index, fd in self._parts.items():
            is_kept = os.fstat(fd).st_size >= _LEAST_KEPT and self._names[index] == part_of(self._targets[index])
            if not is_kept:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._names[index])
            os.close(fd)

    def has(self, tick: Callable[[], None]) -> dict[str, list[list[Any]]]:
        """Return what is there of each file: (length, digest, whether it is incomplete)."""
        found: dict[str, list[list[Any]]] = {}
        for index, (entry, path) in enumerate(zip(self._entries, self._targets, strict=True)):
            if entry.is_folder:
                continue
            there = []
            with contextlib.suppress(FileNotFoundError), open(os.open(path, os.O_RDONLY | _NO_FOLLOW), "rb") as file:
                if os.fstat(file.fileno()).st_size == entry.size:
                    there.append([entry.size, digest_of(file, entry.size, tick), False])
            if os.path.lexists(part_of(path)) and self._open_part(index, is_new=False):
                with open(os.dup(self._parts[index]), "rb") as file:
                    length = min(os.fstat(file.fileno()).st_size, entry.size)
                    there.append([length, digest_of(file, length, tick), True])
            if there:
                found[str(index)] = there
        return found

    def keep(self, index: int) -> int:
        """Keep a file that is there with the same content; only its mode may change. Returns its size."""
        self._drop_part(index)
        fd = os.open(self._targets[index], os.O_RDONLY | _NO_FOLLOW)
        try:
            if os.fstat(fd).st_mode & 0o777 != self._entries[index].mode:
                os.fchmod(fd, self._entries[index].mode)
        finally:
            os.close(fd)
        return self._entries[index].size

    def begin(self, index: int, offset: int) -> int:
        """Begin to write a file from `offset` on. Returns the offset."""
        if index not in self._parts and not self._open_part(index, is_new=True):
            self._open_other(index)
        os.ftruncate(self._parts[index], offset)
        os.lseek(self._parts[index], offset, os.SEEK_SET)
        self._file = index
        return offset

    def write(self, piece: bytes) -> int:
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(self._parts[self._file], rest) :]
        self.counts["bytes"] += len(piece)
        return len(piece)

    def end(self, index: int) -> None:
        """Give a complete file its mode and its name."""
        os.fchmod(self._parts[index], self._entries[index].mode)
        os.replace(self._names[index], self._targets[index])
        os.close(self._parts.pop(index))
        self.counts["copied"] += 1

    def set_folder_modes(self) -> None:
        """Set the modes of folders, the deepest first: nothing could be written to a read-only one."""
        folders = [
            (path, entry.mode) for entry, path in zip(self._entries, self._targets, strict=True) if entry.is_folder
        ]
        for path, mode in sorted(folders, reverse=True):
            os.chmod(path, mode)

    def _open_part(self, index: int, *, is_new: bool) -> bool:
        """Open and lock the incomplete file beside a target. Returns False if another transfer writes it."""
        name = part_of(self._targets[index])
        fd = os.open(name, os.O_RDWR | (os.O_CREAT if is_new else 0) | _NO_FOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its writer may have completed and renamed it between the two lines above.
            if not os.path.samestat(os.fstat(fd), os.lstat(name)):
                raise FileNotFoundError(name)
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            return False
        self._parts[index], self._names[index] = fd, name
        return True

    def _open_other(self, index: int) -> None:
        folder = os.path.dirname(self._targets[index])
        name = os.path.join(folder, f".{os.urandom(8).hex()}{PART_ENDING}")
        self._parts[index] = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600)
        self._names[index] = name

    def _drop_part(self, index: int) -> None:
        if index in self._parts:
            os.unlink(self._names[index])
            os.close(self._parts.pop(index))
