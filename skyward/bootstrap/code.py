"""User code for the nodes: local modules and the image's includes, as files named by their content."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.user_lines import warn_user
from ..errors import UsageError
from ..values.image import Image
from .ignore import ALWAYS, Rules, rules_above, rules_in
from .roots import Root, editable_metadata, local_roots

_LARGE = 256 * 1024
"""Bytes from which a file is sent separately, so that edits of other files do not send it again."""
_LARGEST_IN_PACKAGE = 10 * 2**20
"""Bytes above which a file in a package is not sent unless the image includes it."""
_MUCH = 100 * 2**20
_MOST_ENTRIES = 100_000
_CWD = "work"
_METADATA = ".installed"
"""Folder with the metadata of packages that are installed editable here, for importlib.metadata on the node."""
_METADATA_FILES = ("METADATA", "entry_points.txt", "top_level.txt")


@dataclass(frozen=True, kw_only=True)
class Code:
    """Code for the nodes. `path` and `cwd` are relative to the folder where it is unpacked."""

    name: str
    """Name derived from the content, so that the same files have the same name."""
    archive: bytes = field(repr=False)
    """Tar archive of the small files, with a list of the large files and their places."""
    objects: Mapping[str, str]
    """Local paths of the large files by SHA-256."""
    sources: Mapping[str, str] = field(repr=False)
    """Local paths of all files by their place on the node."""
    path: tuple[str, ...]
    cwd: str
    left_out: tuple[str, ...]
    """Files in packages that are too large to be sent without an include."""

    def to_bytes(self) -> bytes:
        """Return the code as bytes, for `from_bytes` of another process on this machine."""
        facts = {name: getattr(self, name) for name in ("name", "objects", "path", "cwd", "left_out")}
        return json.dumps(facts).encode() + b"\n" + self.archive

    @classmethod
    def from_bytes(cls, data: bytes) -> Code:
        """Return the code of which `to_bytes` made these bytes."""
        head, _, archive = data.partition(b"\n")
        facts: dict[str, Any] = json.loads(head)
        facts |= {name: tuple(facts[name]) for name in ("path", "left_out")}
        return cls(archive=archive, sources={}, **facts)

    @functools.cached_property
    def compressed(self) -> bytes:
        """Archive compressed with gzip. Computed only if it has to be sent, because it takes longer than the rest."""
        return gzip.compress(self.archive, compresslevel=3, mtime=0)


def gather(
    image: Image,
    *,
    path: Sequence[str] | None = None,
    cwd: str | None = None,
    modules: Mapping[str, object] | None = None,
    named: Sequence[str] = (),
) -> Code:
    """Read the files to send.

    Warns about files that are left out, and about large amounts of included files.

    Args:
        image: Image with includes and excludes.
        path: A sys.path; by default that of this process.
        cwd: Working folder; by default that of this process.
        modules: Loaded modules; by default those of this process.
        named: Files in the working folder that a command names, relative to it.

    Raises:
        UsageError: An include does not exist, or the modules are too large to be sent without includes.
    """
    here = os.path.realpath(cwd or os.getcwd())
    gathered = _Gathered(Rules.parse(here, (*ALWAYS, *image.excludes)))
    path = sys.path if path is None else path
    roots = local_roots(path, here, sys.modules if modules is None else modules)
    places = _places(roots, here)
    for root in roots:
        gathered.add_modules(root, places[root.folder])
    for file in named:
        gathered.add_named(file, here)
    if gathered.size > _MUCH:
        raise UsageError(
            f"sys.path: the modules in {', '.join(root.folder for root in roots)} are {gathered.size / 1e6:.0f} MB, "
            f"too much to send: {gathered.largest()}; leave some out with Image(excludes=[...]) or .gitignore"
        )
    included = [gathered.include(entry, here) for entry in image.includes]
    if gathered.size > _MUCH:
        warn_user(f"Image.includes: {gathered.size / 1e6:.0f} MB are sent to each node: {gathered.largest()}")
    if gathered.left_out:
        files = ", ".join(gathered.left_out)
        warn_user(f"files: too large to send: {files}; list them in Image(includes=[...]) to send them")
    metadata = [gathered.add_metadata(folder) for folder in editable_metadata(path, roots)]
    on_path = (*filter(None, included), *(places[root.folder] for root in roots), _CWD, *metadata)
    return gathered.packed(tuple(dict.fromkeys(on_path)))


def path_of_include(entry: str, here: str) -> str:
    """Return the path of a file or folder that an image includes. Raises UsageError: there is none."""
    path = os.path.realpath(os.path.join(here, os.path.expanduser(entry)))
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise UsageError(
            f"Image.includes={entry!r}: does not exist; correct the path, which is relative to {here}",
            field="includes",
            value=entry,
        )
    return path


def _places(roots: list[Root], here: str) -> dict[str, str]:
    """Return the name of each folder on the node: the local one if possible, so that tracebacks look alike."""
    places: dict[str, str] = {}
    for root in roots:
        name = _CWD if root.folder == here else os.path.basename(root.folder) or "root"
        while name in places.values() or (name == _CWD and root.folder != here):
            name += "_"
        places[root.folder] = name
    return places


class _Gathered:
    """Collector of files by their place on the node, and the rules for files that are not sent."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._files: dict[str, tuple[str, int, int]] = {}
        self._entries = 0
        self._left_out: dict[str, str] = {}

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(path for place, path in self._left_out.items() if place not in self._files)

    @property
    def size(self) -> int:
        return sum(size for _, size, _ in self._files.values())

    def largest(self) -> str:
        first = sorted(self._files.values(), key=lambda file: -file[1])[:5]
        return ", ".join(f"{path} ({size / 1e6:.1f} MB)" for path, size, _ in first)

    def add_modules(self, root: Root, place: str) -> None:
        """Add Python files anywhere, and all files of packages except hidden and large ones."""

        def may_hold(folder: str) -> bool:
            name = os.path.basename(folder)
            is_data = not name.startswith(".") and _is_in_package(os.path.dirname(folder), root.folder)
            return (name.isidentifier() or is_data) and root.has(folder)

        for path in self._walk(root.folder, rules_above(root.folder), may_hold):
            name = os.path.basename(path)
            is_wanted = name.endswith((".py", ".so")) or _is_in_package(os.path.dirname(path), root.folder)
            if is_wanted and root.has(path) and not name.startswith("."):
                self._add(path, os.path.join(place, os.path.relpath(path, root.folder)), _LARGEST_IN_PACKAGE)

    def add_named(self, file: str, here: str) -> None:
        """Add a file that a command names. Beside a program, Python looks for modules first, so they come along."""
        path = os.path.join(here, file)
        if self._rules.verdict(path, is_folder=False):
            return
        self._add(path, os.path.join(_CWD, file), _LARGEST_IN_PACKAGE)
        folder = os.path.dirname(file)
        if folder and file.endswith(".py"):
            self.add_modules(Root(folder=os.path.join(here, folder)), os.path.join(_CWD, folder))

    def add_metadata(self, folder: str) -> str:
        """Add the metadata of a package that is installed editable. Return the folder for sys.path."""
        for name in _METADATA_FILES:
            self._add(os.path.join(folder, name), os.path.join(_METADATA, os.path.basename(folder), name), None)
        return _METADATA

    def include(self, entry: str, here: str) -> str:
        """Add an include of the image, even if git ignores it. Return the folder for sys.path, or ""."""
        path = path_of_include(entry, here)
        inside = os.path.relpath(path, here)
        place = os.path.normpath(os.path.join(_CWD, os.path.basename(path) if inside.startswith("..") else inside))
        if os.path.isfile(path):
            self._add(path, place, None)
            return ""
        above = rules_above(path)
        if _is_ignored(above, path, is_folder=True):
            above = []
        for file in self._walk(path, above, lambda folder: True):
            self._add(file, os.path.normpath(os.path.join(place, os.path.relpath(file, path))), None)
        return place

    def _walk(self, folder: str, above: list[Rules], may_hold: Callable[[str], bool]) -> Iterator[str]:
        waiting: list[tuple[str, list[Rules], tuple[str, ...]]] = [(folder, above, ())]
        while waiting:
            at, rules, inside = waiting.pop()
            real = os.path.realpath(at)
            if real in inside:  # a link to a folder above, which would never end; any other link is followed
                continue
            inside = (*inside, real)
            rules = [*rules, *rules_in(at)]
            for entry in sorted(_entries(at), key=lambda entry: entry.name):
                self._count(folder)
                is_folder = entry.is_dir()
                if self._rules.verdict(entry.path, is_folder=is_folder) or _is_ignored(
                    rules, entry.path, is_folder=is_folder
                ):
                    continue
                if not is_folder:
                    yield entry.path
                elif may_hold(entry.path) and not os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                    waiting.append((entry.path, rules, inside))

    def _count(self, folder: str) -> None:
        self._entries += 1
        if self._entries > _MOST_ENTRIES:
            raise UsageError(
                f"{folder}: more than {_MOST_ENTRIES} files; start in the folder of your project, or leave out files "
                "with Image(excludes=[...]) or .gitignore"
            )

    def _add(self, path: str, place: str, limit: int | None) -> None:
        try:
            status = os.stat(path)
        except OSError:  # a broken link
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if not os.access(path, os.R_OK):
            if limit is not None:
                return
            raise UsageError(
                f"Image.includes={path!r}: no permission to read it; change its mode, or leave it out",
                field="includes",
                value=path,
            )
        if limit is not None and status.st_size > limit:
            self._left_out[place] = path
            return
        self._files[place] = (path, status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644)

    def packed(self, path: tuple[str, ...]) -> Code:
        objects: dict[str, str] = {}
        large: list[str] = []
        content = io.BytesIO()
        # Reproducible, because its hash is its name: sorted, without times and owners.
        with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for folder in path:
                _add_folder(archive, folder)
            for place, (source, size, mode) in sorted(self._files.items()):
                if size >= _LARGE and place == place.strip() and "\n" not in place:  # fits a line of `.objects`
                    digest = _digest_of(source)
                    objects[digest] = source
                    large.append(f"{digest} {mode:o} {place}\n")
                else:
                    with open(source, "rb") as file:
                        _add_file(archive, place, file.read(), mode)
            # File names may have any encoding, so write their bytes unchanged.
            _add_file(archive, ".objects", os.fsencode("".join(large)), 0o644)
        archive_bytes = content.getvalue()
        name = hashlib.sha256(archive_bytes).hexdigest()[:16]
        return Code(
            name=name,
            archive=archive_bytes,
            objects=objects,
            sources={place: source for place, (source, _, _) in self._files.items()},
            path=path,
            cwd=_CWD,
            left_out=self.left_out,
        )


@functools.lru_cache(maxsize=4096)
def _is_in_package(folder: str, root: str) -> bool:
    if folder == root or not folder.startswith(root):
        return False
    return os.path.exists(os.path.join(folder, "__init__.py")) or _is_in_package(os.path.dirname(folder), root)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError:  # unreadable folders are not sent
        return []


def _is_ignored(rules: list[Rules], path: str, *, is_folder: bool) -> bool:
    verdicts = (rule.verdict(path, is_folder=is_folder) for rule in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add_folder(archive: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(entry)


def _add_file(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
