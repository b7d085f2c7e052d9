"""Payload for a node that lacks something: scripts and files, as one tar stream."""

from __future__ import annotations

import io
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from ..values.image import Image
from .code import Code
from .environments import Ours, Users, best_python, wanted_pythons
from .probe import Facts
from .scripts import script
from .uv import OLDEST_UV, OLDEST_UV_FOR_LISTS, client_uv, client_uv_version, packed_uv

LOADER = (
    "umask 077; tmp=${XDG_CACHE_HOME:-$HOME/.cache}/skyward/tmp; "
    'say() { printf "\\001problem cannot write %s\\n" "$tmp"; exit 1; }; '
    'mkdir -p "$tmp" && work=$(mktemp -d "$tmp/XXXXXXXX") || say; '
    'tar -xf - -C "$work" || { rm -rf "$work"; say; }; '
    'exec sh "$work/guard.sh"'
)
"""Command that unpacks the stream and runs it. Everything else is in the stream, so that no process list shows it. The
command is a single line, because csh needs that.
"""
_GRACE_S = 2.0
"""Seconds by which the script's timeout is shorter than the client's, so that it can still report why it ended."""


def write_apt(out: BinaryIO, packages: Sequence[str], limit_s: float) -> None:
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        _add_task(archive, "apt.sh", {"apt": " ".join(packages)}, limit_s)


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Content of the stream. `limit_s` is the timeout of the scripts."""

    image: Image
    facts: Facts
    ours: Ours
    users: Users
    code: Code | None
    folder: str
    beside: str
    limit_s: float
    cache_limit_gib: float

    def write(self, out: BinaryIO) -> None:
        """Write the stream. May block for seconds; see `packed_uv`."""
        has_all = self.facts.ours is not None and self.users.name in self.facts.users
        uv = self._uv()
        # Follow links, because their targets exist only on this machine.
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT, dereference=True) as archive:
            if not has_all:
                self._add_environments(archive)
                if not uv and (packed := self._packed_uv()):
                    archive.add(packed, "uv.gz")
            if self.code is not None:
                _add(archive, "code.tar.gz", self.code.compressed)
                for digest in self.facts.missing_objects:
                    archive.add(self.code.objects[digest], f"objects/{digest}")
            _add_task(archive, "install.sh", self._variables(uv), self.limit_s, self._exports())

    def _add_environments(self, archive: tarfile.TarFile) -> None:
        wheels, others = self.ours.contents(machine=self.facts.machine, libc=self.facts.libc)
        for wheel in wheels:
            _add(archive, f"wheels/{wheel.filename}", wheel.content)
        _add_lines(archive, "ours.txt", [*(f"./wheels/{wheel.filename}" for wheel in wheels), *others])
        _add_lines(archive, "user.txt", self.users.requirements)
        for name, text in self.users.lists.items():
            _add(archive, name, text.encode())
        _add_lines(archive, "setup.txt", self.image.run)
        for place, path in self.users.files.items():
            archive.add(path, place.removeprefix("./"))
        # A package that depends on a "skyward" must not install one: it would hide ours, which comes later on the path.
        _add_lines(archive, "overrides.txt", ["skyward ; python_version < '0'"])

    def _variables(self, uv: str) -> dict[str, str]:
        return {
            "ours": self.ours.name,
            "user": self.users.name,
            "uv": uv,
            "uv_version": client_uv_version(),
            "python": best_python(list(self.facts.pythons), self.image.python_version),
            "wanted_python": " ".join(wanted_pythons(self.image.python_version)),
            "folder": self.folder,
            "beside": self.beside,
            "limit_kib": str(int(self.cache_limit_gib * 2**20)),
            **code_variables(self.code),
        }

    def _exports(self) -> str:
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.users.indexes.items())

    def _uv(self) -> str:
        """Return the path of a usable uv on the node, or ""."""
        oldest = OLDEST_UV_FOR_LISTS if self.users.lists else OLDEST_UV
        for version, path in self.facts.uvs:
            if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= oldest:
                return path
        return ""

    def _packed_uv(self) -> str | None:
        uv = client_uv()
        if uv is None:
            return None
        return packed_uv(uv, system=self.facts.system, machine=self.facts.machine, libc=self.facts.libc)


def code_variables(code: Code | None) -> dict[str, str]:
    return {"code": code.name if code else "", "objects": " ".join(code.objects) if code else ""}


def _add_task(
    archive: tarfile.TarFile, name: str, variables: Mapping[str, str], limit_s: float, more: str = ""
) -> None:
    limit = {"limit_s": str(int(max(1.0, limit_s - _GRACE_S)))}
    _add(archive, "guard.sh", script(("guard.sh",), limit))
    _add(archive, "task.sh", script(("node.sh", "task.sh", "cache.sh", name), {**variables, **limit}, more))


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o600
    archive.addfile(entry, io.BytesIO(content))


def _add_lines(archive: tarfile.TarFile, name: str, lines: list[str] | tuple[str, ...]) -> None:
    _add(archive, name, "".join(f"{line}\n" for line in lines).encode())
