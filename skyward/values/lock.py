"""Lock file as a value: packages with exact versions and hashes, read once."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, Literal, NoReturn

from ..core.frozenmap import FrozenMap
from ..core.records import dataclass
from ..errors import UsageError
from .pip_index import normalized

_LEGAL = "a uv.lock, a pylock.toml (PEP 751), or requirements with hashes (`uv pip compile --generate-hashes`)"
_PYLOCK = re.compile(r"pylock(\.[^.]+)?\.toml")
_COMMENT = re.compile(r"(^|\s)#.*$")
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?\s*(===?\s*[^\s;*]+|@\s*\S+)")
_LOCAL = ("editable", "virtual", "directory")


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Content of a lock file, and of the project files that it needs, at the time when it was read.

    `texts` has the content by file name; the first is that of the lock itself.
    """

    path: str
    kind: Literal["uv", "pylock", "requirements"]
    texts: Mapping[str, str] = field(repr=False)

    @property
    def text(self) -> str:
        return next(iter(self.texts.values()))

    @property
    def digest(self) -> str:
        """SHA-256 of the contents."""
        import hashlib  # here, as `tomllib` below: both take long to import, and most pools have no lock file

        return hashlib.sha256(repr(sorted(self.texts.items())).encode()).hexdigest()

    @functools.cached_property
    def packages(self) -> frozenset[str]:
        """Normalized names of the packages."""
        if self.kind == "requirements":
            return frozenset(normalized(match[1]) for match in map(_PINNED.match, lines_of(self.text)) if match)
        return frozenset(normalized(str(package["name"])) for package in _packages(self.kind, self.text))


def read_lock(path: str | os.PathLike[str] | Lock | None) -> Lock | None:
    """Read a lock file and check that it pins everything. Raises UsageError."""
    if path is None or isinstance(path, Lock):
        return path
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        _refuse(path, "not the path of a lock file")
    place = os.path.abspath(os.path.expanduser(os.fsdecode(os.fspath(path))))
    name = os.path.basename(place)
    texts = {name: _read(place)}
    if name == "uv.lock":
        _check_toml(place, "uv", texts[name])
        texts |= _projects(place, _packages("uv", texts[name]))
        return Lock(path=place, kind="uv", texts=FrozenMap(texts))
    if _PYLOCK.fullmatch(name):
        _check_toml(place, "pylock", texts[name])
        return Lock(path=place, kind="pylock", texts=FrozenMap(texts))
    if name.endswith((".toml", ".lock", ".json", ".yml", ".yaml")) and not name.endswith("requirements.lock"):
        _refuse(place, "a file of another kind")
    _check_requirements(place, texts[name])
    return Lock(path=place, kind="requirements", texts=FrozenMap(texts))


def lines_of(text: str) -> list[str]:
    """Return the logical lines of a requirements file, without comments."""
    bare = "\n".join(_COMMENT.sub("", line) for line in text.splitlines())
    return [line for line in (" ".join(part.split()) for part in bare.replace("\\\n", " ").splitlines()) if line]


def _projects(lock: str, packages: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the pyproject.toml beside a uv.lock, and those of its local packages below, by relative path."""
    folder = os.path.dirname(lock)
    texts = {"pyproject.toml": _read(os.path.join(folder, "pyproject.toml"))}
    for package in packages:
        source = package.get("source", {})
        place = next((str(source[kind]) for kind in _LOCAL if kind in source), "")
        inside = os.path.normpath(os.path.join(place, "pyproject.toml"))
        if place and not inside.startswith("..") and os.path.lexists(os.path.join(folder, inside)):
            texts[inside] = _read(os.path.join(folder, inside))
    return texts


def _packages(kind: str, text: str) -> list[dict[str, Any]]:
    import tomllib

    packages: list[dict[str, Any]] = tomllib.loads(text).get("package" if kind == "uv" else "packages", [])
    return packages


def _check_toml(path: str, kind: str, text: str) -> None:
    try:
        packages = _packages(kind, text)
        names = [str(package["name"]) for package in packages]
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # ValueError: not TOML
        _refuse(path, f"cannot be read ({error!r})")
    if kind == "uv":
        return
    for name, package in zip(names, packages, strict=True):
        if "directory" in package or any("path" in file and "url" not in file for file in _files(package)):
            _refuse(path, f"{name} is a local path, which nodes do not have", "lock a published version of it")
        if not all(file.get("hashes") for file in _files(package)):
            _refuse(path, f"{name} has no hashes", "lock it again with hashes")


def _files(package: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    single = [package[kind] for kind in ("archive", "sdist") if kind in package]
    return [*single, *package.get("wheels", [])]


def _check_requirements(path: str, text: str) -> None:
    for line in lines_of(text):
        requirement = line.partition(" --hash")[0]
        if line.startswith("-"):
            _refuse(path, f"`{line}` is an option", "set indexes with pip_index_url and pip_extra_index_url")
        if not _PINNED.match(requirement) or "--hash=" not in line:
            _refuse(path, f"`{requirement}` has no exact version with a hash")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        what = "the project of the lock" if os.path.basename(path) == "pyproject.toml" else "the lock file"
        _refuse(path, f"{what} cannot be read ({error})")


def _refuse(value: object, problem: str, advice: str = f"use {_LEGAL}") -> NoReturn:
    raise UsageError(f"Image.lock={value!r}: {problem}; {advice}", field="lock", value=value, legal=_LEGAL)
