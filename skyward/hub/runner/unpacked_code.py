"""Code of jobs on the machine of a launcher: unpacked once for each content, and linked into each attempt's folder.

Some file systems take a millisecond to make a file, and a tenth of that to link one. So an attempt whose program has
700 files begins half a second earlier.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path

KEPT = 8
"""Contents that stay unpacked. The next attempt of a job needs the same, and so does the next job of a program."""
_SOURCES = (".py", ".so")
_TIME_S = 315_619_200
"""Time of each file: 2 January 1980. A later one is a change, and a zip archive takes none before 1980 in any zone."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_log = logging.getLogger(__name__)


class CodeChanged(Exception):
    """A program has written into its own sources, which its next attempts would see."""


def unpack_code(code: Path, download: Callable[[Path], object]) -> None:
    """Download an archive and unpack it into a folder, which may have an incomplete one in it."""
    archive = code.with_name("code.tar.gz")
    shutil.rmtree(code, ignore_errors=True)
    code.mkdir()
    download(archive)
    with tarfile.open(archive) as files:
        files.extractall(code, filter=lambda member, path: tarfile.data_filter(member, path).replace(mtime=_TIME_S))
    archive.unlink()


def place_code(code: Path, store: Path, name: str, download: Callable[[Path], object]) -> None:
    """Put code into the folder of an attempt, whose program may write there.

    Sources are hard links to the unpacked code of that name, and all else is a copy. A program that changes its own
    sources in place is noticed by the next attempt, which unpacks them again.

    Args:
        code: The folder.
        store: Folder of the unpacked code, on the same file system.
        name: Name that tells the content and who may share it.
        download: Writes the archive to a file.
    """
    kept = store / f"{_boot()}-{name}"  # nothing here is flushed to the disk, so a crash may have emptied any file
    try:
        if not kept.exists():
            _keep(kept, download)
        _link(kept, code)
    except (OSError, CodeChanged) as error:
        # The launcher has just forgotten it, a file has changed, or the file system has no links.
        _log.info("code %s: is unpacked again: %s", name, error)
        shutil.rmtree(kept, ignore_errors=True)
        unpack_code(code, download)


def forget_code(store: Path) -> None:
    """Remove all unpacked code but the newest. Attempts have links of their own."""
    with contextlib.suppress(FileNotFoundError):
        for old in sorted(store.iterdir(), key=_used_at)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _keep(kept: Path, download: Callable[[Path], object]) -> None:
    """Unpack code in one step for others: they see the whole of it, or nothing."""
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = kept.with_name(f"{kept.name}.{uuid.uuid4().hex}")
    try:
        folder.mkdir()
        unpack_code(folder / "code", download)
        with contextlib.suppress(OSError):  # another runner was faster
            (folder / "code").rename(kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _link(kept: Path, code: Path) -> None:
    shutil.rmtree(code, ignore_errors=True)
    shutil.copytree(kept, code, symlinks=True, copy_function=_place)
    os.utime(kept)


def _place(source: str, target: str) -> None:
    if os.lstat(source).st_mtime_ns != _TIME_S * 10**9:
        raise CodeChanged(f"{source} was changed")
    if source.endswith(_SOURCES):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _used_at(folder: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return "boot"
