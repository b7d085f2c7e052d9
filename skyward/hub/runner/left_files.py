"""Files that a job leaves in its working folder. The folder ends with the attempt, so the output names them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice

from ...node.slot.runtime import current_rank
from .launch_file import CHECKPOINT_DIR

_NAMED = 3
_MOST = 20_000
"""Files that are looked at."""
_CLOCK_S = 0.05
"""Seconds by which a file system's clock may be late."""


@contextlib.contextmanager
def naming_left_files() -> Iterator[None]:
    """Print a line at the end of the block if there are files in the working folder that it wrote."""
    rank, folder, since = current_rank(), "", time.time() - _CLOCK_S
    if rank is None or not rank.local_rank:  # the ranks of a node have one folder
        with contextlib.suppress(FileNotFoundError):  # a call before this one removed it
            folder = os.getcwd()
    try:
        yield
    finally:
        if folder and (sizes := dict(_written(folder, since))):
            with contextlib.suppress(OSError, ValueError):  # the call has closed its output
                sys.stdout.write(f"{_line(sizes)}\n")
                sys.stdout.flush()


def _written(folder: str, since: float) -> Iterator[tuple[str, int]]:
    """Yield path and size of files that are newer. Caches and hidden files are nobody's results."""
    for path in islice(_files(folder), _MOST):
        with contextlib.suppress(OSError):  # it was removed at this moment
            status = os.lstat(path)
            if status.st_mtime >= since:
                name = os.path.relpath(path, folder)
                yield name.encode(errors="replace").decode(), status.st_size  # names may have any encoding


def _files(folder: str) -> Iterator[str]:
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (os.path.join(at, name) for name in names if not name.startswith("."))


def _line(sizes: dict[str, int]) -> str:
    count, end = (f"{len(sizes)} files", "end") if len(sizes) > 1 else ("1 file", "ends")
    largest = sorted(sizes, key=lambda path: (-sizes[path], path))
    names = ", ".join([*largest[:_NAMED], *(["..."] if len(sizes) > _NAMED else [])])
    place = f"the folder in {CHECKPOINT_DIR}" if CHECKPOINT_DIR in os.environ else "storage that outlives the machine"
    return (
        f"[skyward] {count} ({_in_words(sum(sizes.values()))}) in the working folder {end} with this attempt: {names}; "
        f"write files that should stay to {place}"
    )


def _in_words(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB" if size >= 1e3 else f"{size} bytes"
