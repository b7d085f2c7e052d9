"""Backup of a hub in one file, and its way back into an empty hub, also of the other kind of database.

The file is a tar archive: `manifest.json`, `tables/<name>.jsonl.zst` with a JSON list for each row, and
`blobs/<sha256>`. Its last line holds the SHA-256 of all bytes before, so that a file that was cut is known as such.
Nothing is ever extracted by its name: rows go to tables of this program, and blobs are named by what they contain.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard
from sqlalchemy import Connection, LargeBinary, Table, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from ...errors import UsageError
from ..model.refusal import Refusal
from .blobs import PIECE, Blobs, put_blob
from .clock import milliseconds
from .engines import database_url, open_engine, sqlite_path
from .lock import ProcessLock
from .registry_tables import metadata
from .schema import HEAD, prepare_schema
from .snapshots import snapshot_of

FORMAT = "skyward-hub-backup"
_TRAILER = re.compile(rb"\nskyward-hub-backup sha256=([0-9a-f]{64})\n")
_TRAILER_BYTES = len(FORMAT) + len("\n sha256=\n") + 64
_TABLE = re.compile(r"tables/([a-z_]{1,60})\.jsonl\.zst")
_BLOB = re.compile(r"blobs/([0-9a-f]{64})")
_LINE_LIMIT = 1 << 28
"""Bytes of one row. A longer one is no row of a hub."""
_MANIFEST_LIMIT = 1 << 20
_ROWS = 500
"""Rows that are inserted at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupContent:
    """Counts of a backup.

    Attributes:
        rows: Number of rows by table.
        blobs: Number of blobs.
    """

    rows: dict[str, int]
    blobs: int


def backup(url: str, blobs: Blobs, path: Path) -> BackupContent:
    """Write a hub to one file. A server may write at the same time: the file holds one moment.

    Args:
        url: Address of the database.
        blobs: Bytes of artifacts.
        path: File to be made. It appears once it is complete.

    Raises:
        UsageError: The file exists, there is no hub, or bytes of an artifact are missing.
    """
    if path.exists():
        raise UsageError(f"file={str(path)!r}: exists; choose another name, or remove it")
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with snapshot_of(url) as snapshot, unfinished.open("wb") as file:
            content = _write(snapshot.connection, blobs, file)
        unfinished.replace(path)
    except (Refusal, OSError) as error:
        raise UsageError(f"file={str(path)!r}: cannot be written: {error}; run `skyward hub check`") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return content


def restore(url: str, blobs: Blobs, path: Path) -> BackupContent:
    """Read a backup into an empty hub. A hub that is not empty is refused, and a failure leaves it empty.

    Args:
        url: Address of the database. Its kind may differ from that of the backup.
        blobs: Where bytes of artifacts are put.
        path: File of `backup`.

    Raises:
        UsageError: The file is cut, changed or of another program, or the hub is in use or not empty.
    """
    _check_digest(path)
    address = database_url(url)
    database = sqlite_path(address)
    lock = None
    if database is not None:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = ProcessLock(database.with_name(database.name + ".lock"))
    engine = open_engine(address, connections=1, writes=True)
    try:
        prepare_schema(engine, milliseconds(), migrate=True)
        with engine.begin() as connection:
            _check_empty(connection)
            return _read(connection, blobs, path)
    except UsageError:  # which is a ValueError too
        raise
    except (tarfile.TarError, zstandard.ZstdError, ValueError, KeyError, TypeError, SQLAlchemyError, Refusal) as error:
        raise _damaged(path, type(error).__name__) from error
    finally:
        engine.dispose()
        if lock is not None:
            lock.release()


# Writing --------------------------------------------------------------------------------------------------------------


class _Hashed(io.RawIOBase):
    """A file that hashes whatever is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)


def _write(connection: Connection, blobs: Blobs, file: IO[bytes]) -> BackupContent:
    hashed = _Hashed(file)
    rows: dict[str, int] = {}
    with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "manifest.json", json.dumps({"format": FORMAT, "version": 1, "revision": HEAD}).encode())
        for table in metadata.sorted_tables:
            with tempfile.TemporaryFile() as packed:
                rows[table.name] = _pack(connection, table, packed)
                size = packed.tell()
                packed.seek(0)
                _add_stream(archive, f"tables/{table.name}.jsonl.zst", size, packed)
        blob = metadata.tables["blob"]
        # A list: SQLite would keep a cursor open over the hours that large files may take.
        contents = connection.execute(select(blob.c.sha256, func.max(blob.c.size)).group_by(blob.c.sha256)).all()
        for sha256, size in contents:
            with _BlobFile(blobs.open(sha256)) as stream:
                _add_stream(archive, f"blobs/{sha256}", size, stream)
    file.write(f"\n{FORMAT} sha256={hashed.sha256.hexdigest()}\n".encode())
    return BackupContent(rows=rows, blobs=len(contents))


class _BlobFile(io.RawIOBase):
    """Pieces of a blob as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def read(self, size: int = -1) -> bytes:
        while len(self._left) < size and (piece := next(self._pieces, b"")):
            self._left += piece
        taken, self._left = self._left[:size], self._left[size:]
        return taken


def _pack(connection: Connection, table: Table, packed: IO[bytes]) -> int:
    count = 0
    is_bytes = [isinstance(column.type, LargeBinary) for column in table.columns]
    with zstandard.ZstdCompressor(level=3).stream_writer(packed, closefd=False) as writer:
        writer.write(json.dumps(list(table.columns.keys())).encode() + b"\n")
        for row in connection.execution_options(yield_per=1000).execute(select(table)):
            plain = [
                base64.b64encode(value).decode() if binary and value is not None else value
                for value, binary in zip(row, is_bytes, strict=True)
            ]
            writer.write(json.dumps(plain, separators=(",", ":")).encode() + b"\n")
            count += 1
    return count


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    _add_stream(archive, name, len(data), io.BytesIO(data))


def _add_stream(archive: tarfile.TarFile, name: str, size: int, stream: IO[bytes] | io.RawIOBase) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    archive.addfile(member, stream)


# Reading --------------------------------------------------------------------------------------------------------------


def _check_digest(path: Path) -> None:
    """Compare a file with the digest in its last line, before anything of it is used."""
    sha256 = hashlib.sha256()
    try:
        with path.open("rb") as file:
            left = path.stat().st_size - _TRAILER_BYTES
            while left > 0 and (piece := file.read(min(PIECE, left))):
                sha256.update(piece)
                left -= len(piece)
            trailer = _TRAILER.fullmatch(file.read())
    except OSError as error:
        raise UsageError(f"file={str(path)!r}: cannot be read: {error.strerror}; check the name") from None
    if trailer is None:
        raise UsageError(f"file={str(path)!r}: is cut, or is no backup of a hub; copy the whole file again")
    if trailer[1].decode() != sha256.hexdigest():
        raise UsageError(f"file={str(path)!r}: differs from its digest; copy the file again")


def _check_empty(connection: Connection) -> None:
    for name in ("run", "account", "audit", "blob"):
        if connection.execute(select(metadata.tables[name]).limit(1)).first() is not None:
            raise UsageError(f"database: has rows of {name}; restore into an empty hub, in a new --data or database")


def _read(connection: Connection, blobs: Blobs, path: Path) -> BackupContent:
    for table in reversed(metadata.sorted_tables):  # the rows that each database has from its first day
        connection.execute(table.delete())
    rows: dict[str, int] = {}
    received: set[str] = set()
    added: list[str] = []
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                _read_member(connection, blobs, archive, member, rows, received, added)
        _check_complete(connection, rows, received)
        _advance_counters(connection)
    except BaseException:
        for sha256 in added:
            blobs.delete(sha256)
        raise
    return BackupContent(rows=rows, blobs=len(received))


def _read_member(
    connection: Connection,
    blobs: Blobs,
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    rows: dict[str, int],
    received: set[str],
    added: list[str],
) -> None:
    stream = archive.extractfile(member) if member.isreg() else None  # never a link or a device
    if stream is None:
        raise ValueError(member.name)
    if match := _TABLE.fullmatch(member.name):
        if match[1] in rows:
            raise ValueError(member.name)
        rows[match[1]] = _unpack(connection, metadata.tables[match[1]], stream)
    elif match := _BLOB.fullmatch(member.name):
        if not blobs.exists(match[1]):
            added.append(match[1])
        put_blob(blobs, iter(lambda: stream.read(PIECE), b""), match[1], member.size)
        received.add(match[1])
    elif member.name == "manifest.json" and member.size < _MANIFEST_LIMIT:
        _check_manifest(json.loads(stream.read()))
    else:
        raise ValueError(member.name)


def _check_manifest(manifest: dict[str, Any]) -> None:
    if manifest["format"] != FORMAT or manifest["version"] != 1:
        raise ValueError(str(manifest["version"])[:40])
    if manifest["revision"] != HEAD:
        raise UsageError(
            f"file: its tables have revision {str(manifest['revision'])[:40]!r}, and this program's {HEAD!r}; "
            "restore it with the version of skyward that wrote it, then run `skyward hub migrate`"
        )


def _unpack(connection: Connection, table: Table, stream: IO[bytes]) -> int:
    reader = io.BufferedReader(_Decompressed(stream), PIECE)
    names = json.loads(reader.readline(_LINE_LIMIT))
    binary = [name for name in names if isinstance(table.columns[name].type, LargeBinary)]
    count = 0
    lines = iter(lambda: reader.readline(_LINE_LIMIT), b"")
    for part in _batched(lines):
        found = [dict(zip(names, json.loads(line), strict=True)) for line in part]
        for row in found:
            row.update({name: base64.b64decode(row[name], validate=True) for name in binary if row[name] is not None})
        connection.execute(table.insert(), found)
        count += len(found)
    return count


def _batched(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Yield lines in lists, each of bounded number and bytes: a small file may unpack to a large one."""
    part: list[bytes] = []
    size = 0
    for line in lines:
        part.append(line)
        size += len(line)
        if len(part) == _ROWS or size > _LINE_LIMIT:
            yield part
            part, size = [], 0
    if part:
        yield part


class _Decompressed(io.RawIOBase):
    """Plain bytes of a zstd stream, a piece at a time."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(stream)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._reader.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def _check_complete(connection: Connection, rows: dict[str, int], received: set[str]) -> None:
    if missing := set(metadata.tables) - set(rows):
        raise KeyError(sorted(missing)[0])
    named = set(connection.execute(select(metadata.tables["blob"].c.sha256)).scalars())
    if named != received:
        raise KeyError(min(named ^ received))


def _advance_counters(connection: Connection) -> None:
    """Let PostgreSQL number new rows behind those that were given."""
    if connection.dialect.name != "postgresql":
        return
    for table in metadata.sorted_tables:
        column = table.autoincrement_column
        if column is not None:
            connection.execute(
                text(
                    f"SELECT setval(pg_get_serial_sequence('\"{table.name}\"', '{column.name}'),"
                    f' greatest((SELECT coalesce(max({column.name}), 1) FROM "{table.name}"), 1))'
                )
            )


def _damaged(path: Path, problem: str) -> UsageError:
    return UsageError(f"file={str(path)!r}: is damaged ({problem}), and nothing was restored; make a new backup")
