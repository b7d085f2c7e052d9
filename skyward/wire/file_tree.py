"""Files to transfer: the ones that a path or a pattern stands for, and the places where they may go.

No link is followed below the path that somebody named, on either side: a link could lead out of the folder.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Literal

from ..core.records import dataclass

PART_ENDING = ".skyward-part"
"""Ending of files that are not complete. They are never sent."""
_MOST_FILES = 1_000_000

Kind = Literal["file", "folder", "pattern"]


class FileRefused(Exception):
    """A file or a path cannot be transferred. The message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """File or folder of a transfer.

    Args:
        name: Path at the destination, relative, with slashes.
        source: Path of the file that is read; empty on the receiving side.
        size: Bytes; -1 for a folder.
        mode: Permission bits.
    """

    name: str
    source: str = ""
    size: int
    mode: int

    @property
    def is_folder(self) -> bool:
        return self.size < 0


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Entries that a path or a pattern stands for. `base`: what they are relative to, as it was written."""

    kind: Kind
    base: str
    entries: tuple[Entry, ...]


def select(path: str, cwd: str) -> Selection:
    """Find what to send: a file, a folder with everything in it, or everything that a pattern matches.

    Args:
        path: Path or pattern of `glob`, with `**` for any folders; relative to `cwd`, or with `~`.
        cwd: Folder of relative paths.

    Raises:
        FileRefused: Nothing is there, or an entry is neither a file nor a folder.
        OSError: A folder cannot be read.
    """
    full = os.path.join(cwd, os.path.expanduser(path))
    if os.path.isdir(full):
        return Selection(kind="folder", base=path, entries=tuple(_below(os.path.realpath(full), "")))
    if os.path.lexists(full):
        name = os.path.basename(full)
        return Selection(kind="file", base=os.path.dirname(path), entries=(_entry(os.path.realpath(full), name),))
    if not glob.has_magic(path):
        raise FileRefused("does not exist; correct the path")
    base = _fixed_part(path)
    folder = os.path.join(cwd, os.path.expanduser(base))
    entries: dict[str, Entry] = {}
    for match in sorted(glob.glob(full, recursive=True)):
        name = os.path.relpath(match, folder)
        if match.endswith(PART_ENDING) or name == ".":
            continue
        if os.path.isdir(match) and not os.path.islink(match):
            entries[name] = _folder(match, name)
            entries |= {entry.name: entry for entry in _below(match, name)}
        else:
            entries[name] = _entry(match, name)
    if not entries:
        raise FileRefused("matches no file; correct the pattern")
    return Selection(kind="pattern", base=base, entries=tuple(entries.values()))


def _fixed_part(pattern: str) -> str:
    """Return the folders of a pattern ahead of its first wildcard."""
    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first]) or ("/" if pattern.startswith("/") else "")


def _below(folder: str, name: str) -> Iterator[Entry]:
    waiting = [(folder, name)]
    count = 0
    while waiting:
        at, prefix = waiting.pop()
        with os.scandir(at) as found:
            inside = sorted(found, key=lambda entry: entry.name)
        for item in inside:
            count += 1
            if count > _MOST_FILES:
                raise FileRefused(f"has more than {_MOST_FILES:,} files; pack them into an archive")
            if item.name.endswith(PART_ENDING):
                continue
            full = f"{prefix}/{item.name}" if prefix else item.name
            if item.is_dir(follow_symlinks=False):
                yield _folder(item.path, full)
                waiting.append((item.path, full))
            else:
                yield _entry(item.path, full)


def _folder(path: str, name: str) -> Entry:
    return Entry(name=name, source=path, size=-1, mode=stat.S_IMODE(os.lstat(path).st_mode) & 0o777)


def _entry(path: str, name: str) -> Entry:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise FileRefused(f"{path} is a symbolic link; replace it by its target, or name the target")
    if not stat.S_ISREG(status.st_mode):
        raise FileRefused(f"{path} is not a regular file; leave it out")
    return Entry(name=name, source=path, size=status.st_size, mode=stat.S_IMODE(status.st_mode) & 0o777)


# The receiving side -------------------------------------------------------------------------------------------------


def place(into: str, kind: Kind, entries: Sequence[Entry], cwd: str) -> tuple[str, list[Entry]]:
    """Return the folder that entries go to, and the entries with the names that they get there.

    As with cp, a single file goes into `into` if that is a folder or ends with a slash; otherwise it is called so.
    """
    full = os.path.abspath(os.path.join(cwd, os.path.expanduser(into)))
    if kind != "file" or into.endswith("/") or os.path.isdir(full):
        return full, list(entries)
    (entry,) = entries
    renamed = Entry(name=os.path.basename(full), size=entry.size, mode=entry.mode)
    return os.path.dirname(full), [renamed]


def check_names(entries: Sequence[Entry]) -> None:
    """Refuse names that lead out of the folder that they are relative to, whoever sent them."""
    for entry in entries:
        parts = entry.name.split("/")
        if not entry.name or "\0" in entry.name or any(part in ("", ".", "..") for part in parts):
            raise FileRefused(f"the name {entry.name!r} leads out of the folder; rename the file")


class Ways:
    """Ways from a folder to the files below it. Refuses links on them."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._checked: set[str] = set()

    def target(self, entry: Entry) -> str:
        """Return the path of an entry. Raises FileRefused if a link or another kind of file is in its place."""
        path = os.path.join(self._root, entry.name)
        folder = os.path.dirname(path)
        while folder != self._root and folder not in self._checked:
            self._check_folder(folder)
            self._checked.add(folder)
            folder = os.path.dirname(folder)
        if entry.is_folder:
            self._check_folder(path)
            return path
        status = _status(path)
        if status is not None and stat.S_ISLNK(status.st_mode):
            raise FileRefused(f"{path} is a symbolic link there; remove it, or name another place")
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise FileRefused(f"{path} is not a file there; remove it, or name another place")
        return path

    @staticmethod
    def _check_folder(path: str) -> None:
        status = _status(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a folder"
            raise FileRefused(f"{path} is {kind} there; remove it, or name another place")


def in_words(error: OSError) -> str:
    """Describe an error of a file, with advice."""
    advice = "name another path, or change its mode"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free disk space there"
    return f"{error.filename or 'the disk'}: {error.strerror}; {advice}"


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):  # a part of the path that is a file is checked on its own
        return None


def part_of(path: str) -> str:
    """Return the name of the incomplete file beside a file: hidden, and the same in every attempt."""
    folder, name = os.path.split(path)
    stem = name if len(os.fsencode(name)) < 200 else hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(folder, f".{stem}{PART_ENDING}")
