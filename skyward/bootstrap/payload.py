"""What is sent to a node that lacks something: scripts and files, as one tar stream."""

from __future__ import annotations

import functools
import io
import re
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import BinaryIO

from ..image import Image
from .environments import Ours, Users, best_python, wanted_pythons
from .probe import Facts
from .uv import OLDEST_UV, client_uv, client_uv_version, packed_uv

__all__ = ["LOADER", "Payload", "script"]

LOADER = """umask 077
tmp=${XDG_CACHE_HOME:-$HOME/.cache}/skyward/tmp
mkdir -p "$tmp" && work=$(mktemp -d "$tmp/XXXXXXXX") || exit 1
tar -xf - -C "$work" || { rm -rf "$work"; exit 1; }
exec sh "$work/guard.sh"
"""
"""Takes the stream and runs it. Everything else comes in the stream, so that no process shows it as an argument."""
_GRACE_S = 2.0
"""The script ends itself so much before its client gives up on it, and says why."""


def script(name: str, variables: Mapping[str, str], functions: str = "") -> bytes:
    """A script of this folder with these variables, as text for sh."""
    assigned = "".join(f"{variable}={shlex.quote(value)}\n" for variable, value in variables.items())
    return (assigned + _text("node.sh") + functions + _text(name)).encode()


@functools.cache
def _text(name: str) -> str:
    return (files(__package__) / name).read_text()


@dataclass(frozen=True, kw_only=True)
class Payload:
    """`limit_s`: how long the scripts may take."""

    image: Image
    facts: Facts
    ours: Ours
    users: Users
    folder: str
    limit_s: float

    def write(self, out: BinaryIO) -> None:
        """May block for seconds: see `packed_uv`."""
        wheels, others = self.ours.contents(machine=self.facts.machine, libc=self.facts.libc)
        uv = self._uv()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
            if self.facts.ours is None:
                for wheel in wheels:
                    _add(archive, f"wheels/{wheel.filename}", wheel.content)
                _add_lines(archive, "ours.txt", [*(f"./wheels/{wheel.filename}" for wheel in wheels), *others])
            _add_lines(archive, "user.txt", self.users.requirements)
            # A package that depends on one called skyward must not bring it: ours is on the path behind.
            _add_lines(archive, "overrides.txt", ["skyward ; python_version < '0'"])
            if not uv and (packed := self._packed_uv()):
                archive.add(packed, "uv.gz")
            limit_s = str(int(max(1.0, self.limit_s - _GRACE_S)))
            _add(archive, "guard.sh", f"limit_s={limit_s}\n".encode() + script("guard.sh", {}))
            _add(
                archive,
                "install.sh",
                script("install.sh", {**self._variables(uv), "limit_s": limit_s}, self._exports()),
            )

    def _variables(self, uv: str) -> dict[str, str]:
        return {
            "ours": self.ours.name,
            "user": self.users.name,
            "uv": uv,
            "uv_version": client_uv_version(),
            "python": best_python(list(self.facts.pythons), self.image.python_version),
            "wanted_python": " ".join(wanted_pythons(self.image.python_version)),
            "folder": self.folder,
        }

    def _exports(self) -> str:
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.users.indexes.items())

    def _uv(self) -> str:
        """The path there of one that will do."""
        for version, path in self.facts.uvs:
            if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= OLDEST_UV:
                return path
        return ""

    def _packed_uv(self) -> str | None:
        uv = client_uv()
        if uv is None:
            return None
        return packed_uv(uv, system=self.facts.system, machine=self.facts.machine, libc=self.facts.libc)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o600
    archive.addfile(entry, io.BytesIO(content))


def _add_lines(archive: tarfile.TarFile, name: str, lines: list[str] | tuple[str, ...]) -> None:
    _add(archive, name, "".join(f"{line}\n" for line in lines).encode())
