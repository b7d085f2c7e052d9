"""Contents of a node's two environments, skyward's ("ours") and the user's, and names derived from the contents.

Ours consists of wheels that are built on this machine from the running packages. So nodes get exactly the client's
skyward, and never a package of that name from an index.
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
from dataclasses import dataclass, field

from .._version import __version__
from ..errors import UsageError
from ..values.image import Image
from .locks import locked_file

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Earliest time of a zip file, used for all files so that equal contents give equal bytes."""
_FORMAT = 1
"""Part of every name. Increase it when a script makes something else of the same content."""
_COMPANIONS = ("cloudpickle", "xxhash")
_NAME = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")
# A path rather than a name or a URL: it begins like a path, or ends like a package file.
_FILE = re.compile(r"((?:\.{1,2}/|/|~)[^\[\]]*|\.{1,2}|(?![^/]*:)[^\[\]@]+\.(?:whl|tar\.gz|zip))(\[[^\]]*\])?")
_OWN_NAME = re.compile(r"skyward\s*($|[\[<>=!~;@ ])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Environment of the agent: skyward, cloudpickle and xxhash in the client's versions, and nothing else."""

    name: str

    def contents(self, *, machine: str, libc: str) -> tuple[list[Wheel], list[str]]:
        """Return the wheels to upload, and requirements to get from an index because the client's do not run there."""
        wheels, others = [own_wheel()], []
        for project in _COMPANIONS:
            wheel = repacked(project)
            if wheel is not None and any(runs_on(tag, machine, libc) for tag in wheel.tags):
                wheels.append(wheel)
            else:
                others.append(f"{project}=={importlib.metadata.version(project)}")
        return wheels, others


def ours_for(image: Image, base: str = "") -> Ours:
    versions = [importlib.metadata.version(project) for project in _COMPANIONS]
    return Ours(name="ours-" + _hash(own_wheel().digest, versions, image.python_version, *filter(None, [base])))


@dataclass(frozen=True, kw_only=True)
class Users:
    """Environment of the slots: the packages of the image.

    If `pip` uses the image's shell_vars, `name` is only the beginning of the name until their values are known.
    """

    name: str
    requirements: tuple[str, ...]
    indexes: Mapping[str, str] = field(repr=False)
    """Environment variables for uv. They hold credentials in clear text."""
    lists: Mapping[str, str]
    """Texts of further files with packages, by name: a lock, or a project that ties packages to their indexes."""
    files: Mapping[str, str]
    """Local paths of wheels that belong to the requirements, by their path in the requirements."""


def users_for(image: Image, variables: Mapping[str, str] | None = None, base: str = "") -> Users:
    """Return the user's environment.

    Args:
        image: The image.
        variables: Values of `image.shell_vars` on the node; None: not known yet.
        base: Name of the container image that the environment belongs to; empty for none.

    Raises:
        UsageError: A requirement of `image.pip` cannot be used.
    """
    for requirement in image.pip:
        if _OWN_NAME.match(requirement):
            raise UsageError(
                f"Image.pip={requirement!r}: nodes get the skyward that runs here, never one from an index; leave it "
                "out, and list the packages of an extra separately",
                field="pip",
                value=requirement,
            )
    pip, files = _with_files(image.pip)
    setup: list[object] = [image.run] if image.run else []
    lists = _lists(image)
    setup += [part for part in (lists, base) if part]
    name = "user-" + _hash(pip, image.pip_index_url, image.pip_extra_index_url, image.python_version, *setup)
    used = {name for text in image.pip for name in _names_in(text)}
    for unknown in sorted(used - set(image.shell_vars)):
        user = next(text for text in image.pip if unknown in _names_in(text))
        raise UsageError(
            f"Image.pip={user!r}: uses ${unknown}, which is not in Image.shell_vars; define it there",
            field="pip",
            value=unknown,
        )
    values = {name: (variables or {}).get(name, "") for name in used}
    if used:
        name += "." + (_hash(values) if variables is not None else "")
    return Users(
        name=name,
        requirements=tuple(_NAME.sub(lambda match: values[match[1] or match[2]], text) for text in pip),
        indexes=_indexes(image),
        lists=lists,
        files=files,
    )


def _with_files(pip: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Replace local files in the requirements by names derived from their content, and return those files too."""
    requirements: list[str] = []
    files: dict[str, str] = {}
    for requirement in pip:
        match = _FILE.fullmatch(requirement)
        if match is None:
            requirements.append(requirement)
            continue
        path = os.path.abspath(os.path.expanduser(match[1]))
        if not os.path.isfile(path):
            problem, advice = "does not exist", "correct the path, or build the package"
            if os.path.isdir(path):
                problem, advice = "is a folder", "build a wheel of it, or put it on sys.path"
            raise UsageError(f"Image.pip={requirement!r}: {path} {problem}; {advice}", field="pip", value=requirement)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        place = f"./files/{digest[:16]}/{os.path.basename(path)}"
        files[place] = path
        requirements.append(f"{place}{match[2] or ''}")
    return tuple(requirements), files


def _names_in(text: str) -> list[str]:
    return [match[1] or match[2] for match in _NAME.finditer(text)]


def _indexes(image: Image) -> dict[str, str]:
    # In variables instead of arguments, because a URL may contain a password. All indexes have the same rank, as with
    # pip. Otherwise a package that an extra index has in an old version would be taken from there only.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if image.pip_index_url:
        variables["UV_DEFAULT_INDEX"] = image.pip_index_url
    if image.pip_extra_index_url:
        variables["UV_INDEX"] = " ".join(image.pip_extra_index_url)
    for number, index in enumerate(image.pip_indexes):
        for what, value in zip(("USERNAME", "PASSWORD"), index.login(), strict=True):
            if value:
                variables[f"UV_INDEX_{_index_name(number)}_{what}".upper()] = value
    return variables


def _index_name(number: int) -> str:
    return f"skyward{number}"


def _lists(image: Image) -> dict[str, str]:
    if image.lock is not None:
        return dict([locked_file(image.lock)])
    return {"pyproject.toml": _project(image)} if image.pip_indexes else {}


def _project(image: Image) -> str:
    """Return a project that requires the packages of `image.pip_indexes`, each from its index.

    uv ties a package to an index only where a project requires it directly. A constraint does not suffice.
    """
    packages = {name: number for number, index in enumerate(image.pip_indexes) for name in index.packages}
    lines = ["[project]", 'name = "skyward-image"', 'version = "0"', f"dependencies = {json.dumps(list(packages))}"]
    lines += ["[tool.uv.sources]"]
    lines += [f'{name} = {{ index = "{_index_name(number)}" }}' for name, number in packages.items()]
    for number, index in enumerate(image.pip_indexes):
        lines += ["[[tool.uv.index]]", f'name = "{_index_name(number)}"', f"url = {json.dumps(index.location)}"]
        lines += ["explicit = true"]
    return "".join(f"{line}\n" for line in lines)


def _hash(*content: object) -> str:
    text = json.dumps([_FORMAT, *content], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def runs_on(tag: str, machine: str, libc: str) -> bool:
    """Tell whether a wheel of the client's Python with this tag runs on a machine."""
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
    """Return the path of the best interpreter of these (version, path) pairs; "" if none is suitable.

    `wanted` is a minor or an exact version. For a minor version, the client's own patch release is best, and then the
    newest one.
    """
    fits = [(v, path) for v, path in pythons if v == wanted or (wanted.count(".") == 1 and v.startswith(f"{wanted}."))]
    best = max(fits, key=lambda pair: (pair[0] == platform.python_version(), _numbers(pair[0])), default=("", ""))
    return best[1]


def wanted_pythons(wanted: str) -> list[str]:
    """Return the versions to download, best first."""
    here = platform.python_version()
    return [here, wanted] if here.startswith(f"{wanted}.") and sys.implementation.name == "cpython" else [wanted]


# Wheels ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """Wheel in memory. `tags` are compatibility tags, such as "py3-none-any"; `digest` is the content's hex digest."""

    filename: str
    tags: tuple[str, ...]
    content: bytes
    digest: str


@functools.cache
def own_wheel() -> Wheel:
    """Build a wheel of the skyward that runs here. Its version ends with the hash of its content."""
    files = {}
    for folder, folders, names in os.walk(_PACKAGE):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for name in sorted(names):
            # All files of the package, scripts included, except leftovers of editors and interpreters.
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
    """Build a wheel of a package that is installed here; None if it was not installed from a wheel."""
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
    """Join tags for a filename: cp311-cp311-linux_a and cp311-cp311-linux_b become cp311-cp311-linux_a.linux_b."""
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
