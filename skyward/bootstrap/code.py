"""The user's code on its way to the nodes: local modules and what the image includes, as files named by content."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.user_lines import warn_user
from ..errors import UsageError
from ..values.image import Image
from .ignore import ALWAYS, Rules, rules_above, rules_in
from .roots import Root, editable_metadata, local_roots

__all__ = ["Code", "gather"]

_LARGE = 256 * 1024
"""Bytes from which a file travels by itself: an edit elsewhere does not send it again."""
_LARGEST_IN_PACKAGE = 10 * 2**20
"""Bytes above which a file beside modules stays here unless the image includes it."""
_MUCH = 100 * 2**20
_MOST_ENTRIES = 100_000
_CWD = "work"
_METADATA = ".installed"
"""The folder of what importlib.metadata is to know of packages that are installed editable here."""
_METADATA_FILES = ("METADATA", "entry_points.txt", "top_level.txt")


@dataclass(frozen=True, kw_only=True)
class Code:
    """`path` and `cwd` are relative to where it is unpacked."""

    name: str
    """From the content, and so the same for the same files."""
    archive: bytes = field(repr=False)
    """Small files, and a list of which large ones go where: a tar."""
    objects: Mapping[str, str]
    """Large files: SHA-256 to the path here."""
    sources: Mapping[str, str] = field(repr=False)
    """All files: where they go to where they are here."""
    path: tuple[str, ...]
    cwd: str
    left_out: tuple[str, ...]
    """Files beside modules that are too large to travel without being asked for."""

    @functools.cached_property
    def compressed(self) -> bytes:
        """The archive by gzip: made only when it has to be sent, as that takes longer than all the rest."""
        return gzip.compress(self.archive, compresslevel=3, mtime=0)


def gather(
    image: Image,
    *,
    path: Sequence[str] | None = None,
    cwd: str | None = None,
    modules: Mapping[str, object] | None = None,
) -> Code:
    """Read what travels. `path`, `cwd`, `modules`: by default those of this process.

    Raises UsageError where an include does not exist or where it would be too much without being asked for; warns of
    files that are left out, and of much that was asked for.
    """
    here = os.path.realpath(cwd or os.getcwd())
    gathered = _Gathered(Rules.parse(here, (*ALWAYS, *image.excludes)))
    path = sys.path if path is None else path
    roots = local_roots(path, here, sys.modules if modules is None else modules)
    places = _places(roots, here)
    for root in roots:
        gathered.add_modules(root, places[root.folder])
    if gathered.size > _MUCH:
        raise UsageError(
            f"the modules of {', '.join(root.folder for root in roots)} are {gathered.size / 1e6:.0f} MB, too much to "
            f"send without being asked: {gathered.largest()}; leave them out by Image(excludes=[...]) or .gitignore"
        )
    included = [gathered.include(entry, here) for entry in image.includes]
    if gathered.size > _MUCH:
        warn_user(f"{gathered.size / 1e6:.0f} MB go to each node: {gathered.largest()}")
    if gathered.left_out:
        warn_user(f"too large to travel unless Image(includes=[...]) names them: {', '.join(gathered.left_out)}")
    metadata = [gathered.add_metadata(folder) for folder in editable_metadata(path, roots)]
    on_path = (*filter(None, included), *(places[root.folder] for root in roots), _CWD, *metadata)
    return gathered.packed(tuple(dict.fromkeys(on_path)))


def _places(roots: list[Root], here: str) -> dict[str, str]:
    """What each folder is called there: as here, so that tracebacks read alike."""
    places: dict[str, str] = {}
    for root in roots:
        name = _CWD if root.folder == here else os.path.basename(root.folder) or "root"
        while name in places.values() or (name == _CWD and root.folder != here):
            name += "_"
        places[root.folder] = name
    return places


class _Gathered:
    """Files by where they go, and the rules of what does not."""

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
        """Python files anywhere, and all files of packages but hidden ones and large ones."""

        def may_hold(folder: str) -> bool:
            return os.path.basename(folder).isidentifier() and root.has(folder)

        for path in self._walk(root.folder, rules_above(root.folder), may_hold):
            name = os.path.basename(path)
            is_wanted = name.endswith((".py", ".so")) or _is_in_package(os.path.dirname(path), root.folder)
            if is_wanted and root.has(path) and not name.startswith("."):
                self._add(path, os.path.join(place, os.path.relpath(path, root.folder)), _LARGEST_IN_PACKAGE)

    def add_metadata(self, folder: str) -> str:
        """Of a package that is installed from sources which travel. Returns the folder for sys.path."""
        for name in _METADATA_FILES:
            self._add(os.path.join(folder, name), os.path.join(_METADATA, os.path.basename(folder), name), None)
        return _METADATA

    def include(self, entry: str, here: str) -> str:
        """What the image names travels, even where git ignores it. Returns the folder for sys.path, or ""."""
        path = os.path.realpath(os.path.join(here, os.path.expanduser(entry)))
        inside = os.path.relpath(path, here)
        place = os.path.normpath(os.path.join(_CWD, os.path.basename(path) if inside.startswith("..") else inside))
        if os.path.isfile(path):
            self._add(path, place, None)
            return ""
        if not os.path.isdir(path):
            raise UsageError(
                f"Image.includes: {entry!r} does not exist; it is taken relative to {here}",
                field="includes",
                value=entry,
            )
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
            if real in inside:  # a link that leads round; one that leads elsewhere is a second name, and travels too
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
                f"{folder} holds more than {_MOST_ENTRIES} files; start in the folder of your project, or leave out "
                "what the nodes do not need by Image(excludes=[...]) or .gitignore"
            )

    def _add(self, path: str, place: str, limit: int | None) -> None:
        try:
            status = os.stat(path)
        except OSError:  # a link to nothing
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if not os.access(path, os.R_OK):
            if limit is not None:
                return
            raise UsageError(f"Image.includes: {path} cannot be read", field="includes", value=path)
        if limit is not None and status.st_size > limit:
            self._left_out[place] = path
            return
        self._files[place] = (path, status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644)

    def packed(self, path: tuple[str, ...]) -> Code:
        objects: dict[str, str] = {}
        large: list[str] = []
        content = io.BytesIO()
        # The same files give the same bytes: no times, no owners, in order.
        with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for folder in path:
                _add_folder(archive, folder)
            for place, (source, size, mode) in sorted(self._files.items()):
                if size >= _LARGE and place == place.strip() and "\n" not in place:  # a line can hold it
                    digest = _digest_of(source)
                    objects[digest] = source
                    large.append(f"{digest} {mode:o} {place}\n")
                else:
                    with open(source, "rb") as file:
                        _add_file(archive, place, file.read(), mode)
            # Names as they are, whatever their encoding.
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
    except PermissionError:  # what the user may not read does not travel
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
