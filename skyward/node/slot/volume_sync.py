"""Copies between an object store and its copy on a node's disk, in a process of its own.

A slot runs it, because fsspec's clients start threads and import much, which the user's process should not have.

    python -c "...main()" < JSON order      prints one line of JSON: {} or {"error": text, ...}
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...core.process import collect_rarely, die_with_parent
from ...errors import MissingDependency, SkywardError, VolumeFailed
from ...state.volumes import make_room
from ...stores.folders import folder_at
from ...stores.objects import ObjectFolder, StoredFile
from .volume_index import Seen, VolumeCopy

_AT_ONCE = 16
_NAMES_SHOWN = 3
_PART = "part-"


def fetch(store: ObjectFolder, copy: VolumeCopy, *, keeps_changes: bool, limit_bytes: int) -> None:
    """Make the copy equal to the store. Each file appears when it is complete.

    Args:
        store: The store.
        copy: Its copy.
        keeps_changes: Whether files that tasks wrote or deleted here stay as they are. Otherwise they are overwritten.
        limit_bytes: Most bytes of the store, and of all caches together.

    Raises:
        VolumeFailed: The files exceed the limit or the disk, or a file changed here and in the store.
        OSError: The store or the disk failed. Fetched files stay, and the next attempt continues.
    """
    there = _checked(store.entries(), store.path)
    total = sum(entry.size for entry in there.values())
    if total > limit_bytes:
        raise VolumeFailed(
            f"{store.path}: has {_gib(total)}, but cache_gib={limit_bytes / 2**30:g}; raise cache_gib, or name a "
            "folder with less in it"
        )
    index = copy.index()
    written, deleted = copy.changes() if keeps_changes else (set(), set())
    changed = {name for name, entry in there.items() if name not in index or index[name].version != entry.version}
    if conflicts := {name for name in written | deleted if name in changed or (name in index and name not in there)}:
        raise _conflict(store.path, conflicts, "commit(overwrite=True) saves those of this node")
    state = copy.state()
    intact = {name for name in there.keys() - changed if state.get(name) == index[name][1:]} | (written | deleted)
    missing = there.keys() - intact
    for name in state.keys() - there.keys() - written:
        _remove(copy, name)
    _check_disk(store.path, copy, sum(there[name].size for name in missing), limit_bytes)
    index = {name: index[name] for name in index if name in intact}
    for name in os.listdir(copy.home):  # a fetch that was killed left it
        if name.startswith(_PART):
            os.unlink(os.path.join(copy.home, name))
    try:

        def get(name: str) -> None:
            path = os.path.join(copy.files, name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            part_fd, part = tempfile.mkstemp(dir=copy.home, prefix=_PART)
            os.close(part_fd)
            try:
                store.fetch(name, part)
                os.chmod(part, 0o600 if keeps_changes else 0o400)
                os.replace(part, path)
            finally:
                with contextlib.suppress(FileNotFoundError):  # it has been renamed
                    os.unlink(part)
            status = os.stat(path)
            index[name] = Seen(there[name].version, status.st_size, status.st_mtime_ns)

        _at_once(get, missing)
    finally:
        copy.write_index(index)


def save(store: ObjectFolder, copy: VolumeCopy, *, overwrites: bool) -> None:
    """Send files that were written or deleted here to the store.

    Raises:
        VolumeFailed: Others changed some of these files in the store. The rest is saved.
        OSError: The store failed. Files that were sent stay, and the next attempt continues.
    """
    written, deleted = copy.changes()
    index, state = copy.index(), copy.state()
    there = store.entries()

    def is_changed(name: str) -> bool:
        now, seen = there.get(name), index.get(name)
        return (now.version if now else None) != (seen.version if seen else None)

    conflicts = set() if overwrites else {name for name in written | deleted if is_changed(name)}
    conflicts -= {name for name in deleted if name not in there}  # deleted by both
    sent: dict[str, tuple[int, int]] = {}
    try:

        def send(name: str) -> None:
            before = state[name]  # a file that is written meanwhile differs from this, and is sent again
            with open(os.path.join(copy.files, name), "rb") as file, store.create(name) as target:
                while chunk := file.read(8 << 20):
                    target.write(chunk)
            sent[name] = before

        _at_once(send, (written & state.keys()) - conflicts)
        for name in sorted(deleted - conflicts):
            store.delete(name)
            index.pop(name, None)
    finally:
        if sent:
            now = store.entries()
            index |= {name: Seen(now[name].version, *before) for name, before in sent.items() if name in now}
        copy.write_index(index)
    if conflicts:
        raise _conflict(store.path, conflicts, "refresh() after removing them here, or commit(overwrite=True)")


def _checked(there: dict[str, StoredFile], source: str) -> dict[str, StoredFile]:
    """Return the files without markers of folders. Raises VolumeFailed for names that cannot be those of files."""
    if "" in there:
        raise VolumeFailed(f"{source}: is a file; name the folder that it is in")
    files = {name: entry for name, entry in there.items() if name and not name.endswith("/")}
    folders = {name[:at] for name in files for at, letter in enumerate(name) if letter == "/"}
    for name in files:
        if name in folders or "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise VolumeFailed(f"{source}: {name!r} cannot be the name of a file on a disk; rename it in the store")
    return files


def _check_disk(source: str, copy: VolumeCopy, needed: int, limit_bytes: int) -> None:
    if needed:
        make_room(needed, limit_bytes)
    free = shutil.disk_usage(copy.home).free
    if needed > free:
        raise VolumeFailed(f"{source}: needs {_gib(needed)}, but {copy.home} has {_gib(free)} free; free disk space")


def _remove(copy: VolumeCopy, name: str) -> None:
    """Remove a file, and the folders that are empty without it."""
    with contextlib.suppress(FileNotFoundError):  # a task removed it meanwhile
        os.unlink(os.path.join(copy.files, name))
    with contextlib.suppress(OSError):  # not empty
        while name := os.path.dirname(name):
            os.rmdir(os.path.join(copy.files, name))


def _at_once(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Work on several files at once; the first failure ends it."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="skyward-volume") as threads:
        futures = [threads.submit(work, name) for name in sorted(names)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _conflict(source: str, names: set[str], advice: str) -> VolumeFailed:
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return VolumeFailed(
        f"{source}: {shown}{more}: changed here and in the store, and neither was overwritten; {advice}",
        files=tuple(sorted(names)),
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


# The process ----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Carry out one order: {"action", "source", "home", ...} for `fetch` or `save`."""
    die_with_parent()
    collect_rarely()
    order = json.loads(sys.stdin.buffer.read())
    answer: dict[str, Any] = {}
    try:
        _carry_out(order)
    except MissingDependency as error:
        answer = {"error": f"{error}; on nodes of other machines, add it to Image(pip=[...])", "missing": error.name}
    except SkywardError as error:
        answer = {"error": str(error), "files": getattr(error, "files", ())}
    except OSError as error:
        numbers = {error.errno, getattr(error.__cause__, "errno", None)}
        full = not numbers.isdisjoint((errno.ENOSPC, errno.EDQUOT))
        advice = "free disk space on the node" if full else "check the store's name, its network and the credentials"
        answer = {"error": f"{error}; {advice}", "retryable": not full}
    sys.stdout.write(f"{json.dumps(answer)}\n")
    return 0


def _carry_out(order: dict[str, Any]) -> None:
    store = folder_at(order["source"])
    assert isinstance(store, ObjectFolder)  # a Volume refuses the URLs of disks
    copy = VolumeCopy(order["home"])
    if order["action"] == "fetch":
        fetch(store, copy, keeps_changes=order["is_writable"], limit_bytes=order["limit_bytes"])
    else:
        save(store, copy, overwrites=order["overwrites"])
