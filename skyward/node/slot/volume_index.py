"""Index of a copy of an object store: what was there when it was copied, so that changes on either side are seen.

The home of a copy has `files`, `index.json`, `source` and the lock of its one writer. This module is light, because
slots use it after every call.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from ...core.records import dataclass

_POLL_S = 0.05


class Seen(NamedTuple):
    """State of a file when it was last equal here and in the store."""

    version: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class VolumeCopy:
    """Copy of an object store on this disk."""

    home: str

    @property
    def files(self) -> str:
        return os.path.join(self.home, "files")

    def index(self) -> dict[str, Seen]:
        """Return what the index has; nothing if there is none, or a crash left half of it."""
        try:
            with open(os.path.join(self.home, "index.json"), encoding="utf-8") as file:
                return {name: Seen(*seen) for name, seen in json.load(file).items()}
        except (OSError, ValueError, TypeError):
            return {}

    def write_index(self, index: dict[str, Seen]) -> None:
        path = os.path.join(self.home, "index.json")
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(index, file)
        os.replace(f"{path}.new", path)

    def state(self) -> dict[str, tuple[int, int]]:
        """Return size and time of every file. A link counts as the file that it leads to."""
        found = {}
        for at, _, names in os.walk(self.files):
            for name in names:
                path = os.path.join(at, name)
                with contextlib.suppress(OSError):  # removed meanwhile, or a link to nothing
                    status = os.stat(path)
                    found[os.path.relpath(path, self.files)] = (status.st_size, status.st_mtime_ns)
        return found

    def changes(self) -> tuple[set[str], set[str]]:
        """Return the names of files that were written, and of those that were deleted, since the last copy."""
        index, state = self.index(), self.state()
        written = {name for name, now in state.items() if name not in index or now != index[name][1:]}
        return written, index.keys() - state.keys()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process or thread works on the copy. Polls, so that a cancelled call ends at once."""
        lock = os.open(os.path.join(self.home, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(lock)
