"""The two environments of a node, ours and the user's: what is in them, and the names that their content gives them.

Ours is made of wheels that are made here, of what runs here: nodes get the client's own skyward, not one of that name
elsewhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

from .._version import __version__
from ..errors import UsageError
from ..values.image import Image

__all__ = [
    "Ours",
    "Users",
    "Wheel",
    "best_python",
    "ours_for",
    "own_wheel",
    "repacked",
    "runs_on",
    "users_for",
    "wanted_pythons",
]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: the same content gives the same bytes."""
_FORMAT = 1
"""Part of every name: raised when what a script makes of the same content changes."""
_COMPANIONS = ("cloudpickle", "xxhash")
_NAME = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")
# A path rather than a name or a URL: it begins like one, or ends as packages do.
_FILE = re.compile(r"((?:\.{1,2}/|/|~)[^\[\]]*|\.{1,2}|(?![^/]*:)[^\[\]@]+\.(?:whl|tar\.gz|zip))(\[[^\]]*\])?")
_OWN_NAME = re.compile(r"skyward\s*($|[\[<>=!~;@ ])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Where the agent runs: skyward, cloudpickle and xxhash, in the client's versions, and nothing else."""

    name: str

    def contents(self, *, machine: str, libc: str) -> tuple[list[Wheel], list[str]]:
        """Wheels to upload, and requirements that come from an index because the client's do not run there."""
        wheels, others = [own_wheel()], []
        for project in _COMPANIONS:
            wheel = repacked(project)
            if wheel is not None and any(runs_on(tag, machine, libc) for tag in wheel.tags):
                wheels.append(wheel)
            else:
                others.append(f"{project}=={importlib.metadata.version(project)}")
        return wheels, others


def ours_for(image: Image) -> Ours:
    versions = [importlib.metadata.version(project) for project in _COMPANIONS]
    return Ours(name="ours-" + _hash(own_wheel().digest, versions, image.python_version))


@dataclass(frozen=True, kw_only=True)
class Users:
    """Where the slots run: what the image asks for.

    `name` is whole once the values of the image's shell_vars are known, if `pip` uses them; before, it is how the
    name begins.
    """

    name: str
    requirements: tuple[str, ...]
    indexes: Mapping[str, str]
    """Variables for uv."""
    files: Mapping[str, str]
    """Wheels of this machine that go with them: where the requirements have them to where they are here."""


def users_for(image: Image, variables: Mapping[str, str] | None = None) -> Users:
    """`variables`: the values of `image.shell_vars` on the node; None: not known yet. Raises UsageError."""
    for requirement in image.pip:
        if _OWN_NAME.match(requirement):
            raise UsageError(
                f"Image.pip: {requirement!r}; nodes get the skyward that runs here, never one from an index: leave it "
                "out, and name the packages of an extra by themselves",
                field="pip",
                value=requirement,
            )
    pip, files = _with_files(image.pip)
    name = "user-" + _hash(pip, image.pip_index_url, image.pip_extra_index_url, image.python_version)
    used = {name for text in image.pip for name in _names_in(text)}
    for unknown in sorted(used - set(image.shell_vars)):
        raise UsageError(f"Image.pip uses ${unknown}, which is not in Image.shell_vars", field="pip", value=unknown)
    values = {name: (variables or {}).get(name, "") for name in used}
    if used:
        name += "." + (_hash(values) if variables is not None else "")
    return Users(
        name=name,
        requirements=tuple(_NAME.sub(lambda match: values[match[1] or match[2]], text) for text in pip),
        indexes=_indexes(image),
        files=files,
    )


def _with_files(pip: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Requirements in which files of this machine are named by their content, and those files."""
    given: list[str] = []
    files: dict[str, str] = {}
    for requirement in pip:
        match = _FILE.fullmatch(requirement)
        if match is None:
            given.append(requirement)
            continue
        path = os.path.abspath(os.path.expanduser(match[1]))
        if not os.path.isfile(path):
            wrong = "is a folder; build a wheel of it, or put it on sys.path" if os.path.isdir(path) else "is not there"
            raise UsageError(f"Image.pip: {requirement!r}: {path} {wrong}", field="pip", value=requirement)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        place = f"./files/{digest[:16]}/{os.path.basename(path)}"
        files[place] = path
        given.append(f"{place}{match[2] or ''}")
    return tuple(given), files


def _names_in(text: str) -> list[str]:
    return [match[1] or match[2] for match in _NAME.finditer(text)]


def _indexes(image: Image) -> dict[str, str]:
    # As variables, not arguments: a URL may hold a password. All indexes count alike, as with pip, or a package that
    # an extra index happens to have in an old version would be found there only.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if image.pip_index_url:
        variables["UV_DEFAULT_INDEX"] = image.pip_index_url
    if image.pip_extra_index_url:
        variables["UV_INDEX"] = " ".join(image.pip_extra_index_url)
    return variables


def _hash(*content: object) -> str:
    text = json.dumps([_FORMAT, *content], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def runs_on(tag: str, machine: str, libc: str) -> bool:
    """Whether a wheel with this tag, of the client's own Python, runs there."""
    where = tag.rpartition("-")[2]
    if where == "any":
        return True
    match = _MANYLINUX.fullmatch(where)
    if match is None or not libc.startswith("glibc"):
        return where.startswith("musllinux_") and where.endswith(f"_{machine}") and libc == "musl"
    return match[3] == machine and _numbers(f"{match[1]}.{match[2]}") <= _numbers(libc.removeprefix("glibc"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def best_python(pythons: list[tuple[str, str]], wanted: str) -> str:
    """The path of the interpreter to use, of (version, path) pairs; "" where none will do.

    `wanted` is a minor version, of which the client's own patch release is best and then the newest, or an exact one.
    """
    fits = [(v, path) for v, path in pythons if v == wanted or (wanted.count(".") == 1 and v.startswith(f"{wanted}."))]
    best = max(fits, key=lambda pair: (pair[0] == platform.python_version(), _numbers(pair[0])), default=("", ""))
    return best[1]


def wanted_pythons(wanted: str) -> list[str]:
    """Versions to download, best first."""
    here = platform.python_version()
    return [here, wanted] if here.startswith(f"{wanted}.") and sys.implementation.name == "cpython" else [wanted]


# Wheels ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """`tags`: the compatibility tags, such as "py3-none-any"; `digest`: of the content, in hexadecimal."""

    filename: str
    tags: tuple[str, ...]
    content: bytes
    digest: str


@functools.cache
def own_wheel() -> Wheel:
    """The package that runs here, as a wheel; its version ends in the hash of its content."""
    files = {}
    for folder, folders, names in os.walk(_PACKAGE):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for name in sorted(names):
            # Whatever the package holds, pages and scripts too; not what editors and interpreters leave in it.
            if not (name.startswith((".", "#")) or name.endswith((".pyc", ".pyo", "~"))):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    files[os.path.join("skyward", os.path.relpath(path, _PACKAGE))] = file.read()
    digest = _digest(files)
    version = f"{__version__}+{digest[:12]}"
    info = f"skyward-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: skyward\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: skyward\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    filename = f"skyward-{version}-py3-none-any.whl"
    return Wheel(filename=filename, tags=("py3-none-any",), content=_zipped(files, info), digest=digest)


@functools.cache
def repacked(project: str) -> Wheel | None:
    """A package as it is installed here, made a wheel again; None where it was not installed by one."""
    distribution = importlib.metadata.distribution(project)
    files = {}
    info = ""
    for path in distribution.files or ():
        if path.parts[0] == ".." or path.name in ("RECORD", "INSTALLER", "REQUESTED") or path.suffix == ".pyc":
            continue
        files[str(path)] = path.read_binary()
        if path.parts[0].endswith(".dist-info"):
            info = path.parts[0]
    tags = tuple(
        line.partition(":")[2].strip()
        for line in (distribution.read_text("WHEEL") or "").splitlines()
        if line.startswith("Tag:")
    )
    if not info or not tags:
        return None
    stem = info.removesuffix(".dist-info")
    return Wheel(filename=f"{stem}-{_joined(tags)}.whl", tags=tags, content=_zipped(files, info), digest=_digest(files))


def _joined(tags: tuple[str, ...]) -> str:
    """As a filename has them: cp311-cp311-linux_a and cp311-cp311-linux_b are cp311-cp311-linux_a.linux_b."""
    parts = zip(*(tag.split("-") for tag in tags), strict=True)
    return "-".join(".".join(dict.fromkeys(part)) for part in parts)


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()


def _zipped(files: dict[str, bytes], info: str) -> bytes:
    record = []
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}\n")
        record.append(f"{info}/RECORD,,\n")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", _EPOCH), "".join(record))
    return out.getvalue()
