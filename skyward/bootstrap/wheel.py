"""Wheels that are made here, of what runs here: nodes get the client's own skyward, not one of that name elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import io
import os
import zipfile
from dataclasses import dataclass

from .._version import __version__

__all__ = ["Wheel", "own_wheel", "repacked"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: the same content gives the same bytes."""


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
