"""Facts about a node, parsed from the output of the scripts that run there: lines with a name and a text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

_MARK = "\1"
_NEWLINE, _NUL = "\2", "\3"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Complete environment on a node. `path` is the sys.path that its interpreter has there."""

    python: str
    version: str
    path: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a node; unknown ones are empty.

    `is_whole` tells whether the script reached its end, and `problem` describes what stopped it.
    """

    system: str = ""
    machine: str = ""
    libc: str = ""
    root: str = ""
    cores: int = 1
    memory_gib: float = 0.0
    free_gib: float | None = None
    folder: str = ""
    ours: Environment | None = None
    users: dict[str, Environment] = field(default_factory=dict)
    """User environments by name."""
    uvs: tuple[tuple[str, str], ...] = ()
    """(version, path) of each uv."""
    pythons: tuple[tuple[str, str], ...] = ()
    """(version, path) of each CPython."""
    missing_objects: tuple[str, ...] = ()
    """Large files of the user's code that the node does not have."""
    missing_apt: tuple[str, ...] = ()
    is_unpacked: bool = False
    """Whether the user's code is in the pool's folder."""
    variables: dict[str, str] = field(default_factory=dict)
    failed_variables: dict[str, int] = field(default_factory=dict)
    """Exit codes of commands that failed or printed nothing, by variable."""
    environ: dict[str, str] = field(default_factory=dict, repr=False)
    problem: str = ""
    is_whole: bool = False

    def updated(self, later: Facts) -> Facts:
        """Return these facts with those of a later script."""
        return replace(
            self,
            ours=later.ours or self.ours,
            users={**self.users, **later.users},
            folder=later.folder or self.folder,
            variables={**self.variables, **later.variables},
        )


def read_facts(lines: Iterable[str]) -> Facts:
    """Parse the lines of a script. Lines without the mark are ignored, because a login shell may print anything."""
    plain: dict[str, str] = {}
    users: dict[str, Environment] = {}
    variables: dict[str, str] = {}
    failed: dict[str, int] = {}
    missing: list[str] = []
    tools: dict[str, list[tuple[str, str]]] = {"uv": [], "python": []}
    for line in lines:
        if not line.startswith(_MARK):
            continue
        name, _, text = line[1:].rstrip("\r\n").partition(" ")
        kind, _, rest = name.partition(":")
        if kind == "user":
            users[rest] = _environment(text)
        elif kind == "variable":
            code, _, value = text.partition(" ")
            variables[rest] = value.replace(_NEWLINE, "\n")
            if code != "0" or not value:
                failed[rest] = int(code)
        elif kind == "missing":
            missing.append(text)
        elif kind == "uv":
            version, path = text.split(" ", 1)
            tools[kind].append((version, path))
        elif kind == "python":
            implementation, version, path = text.split(" ", 2)
            if implementation == "cpython":
                tools[kind].append((version, path))
        else:
            plain[name] = text
    return Facts(
        system=plain.get("system", ""),
        machine=plain.get("machine", ""),
        libc=plain.get("libc", ""),
        root=plain.get("root", ""),
        cores=_number(plain.get("cores")) or 1,
        memory_gib=_number(plain.get("memory_kib")) / 2**20,
        free_gib=_number(plain["free_kib"]) / 2**20 if plain.get("free_kib") else None,
        folder=plain.get("folder", ""),
        ours=_environment(plain["ours"]) if "ours" in plain else None,
        users=users,
        uvs=tuple(tools["uv"]),
        pythons=tuple(tools["python"]),
        missing_objects=tuple(missing),
        missing_apt=tuple(plain.get("apt", "").split()),
        is_unpacked="unpacked" in plain,
        variables=variables,
        failed_variables=failed,
        environ=_environ(plain.get("environ", "")),
        problem=plain.get("problem", ""),
        is_whole="end" in plain,
    )


def _environment(text: str) -> Environment:
    content = json.loads(text)
    return Environment(python=content["python"], version=content["version"], path=tuple(content["path"]))


def _environ(text: str) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in text.split(_NUL) if "=" in entry)
    return {name: value.replace(_NEWLINE, "\n") for name, _, value in pairs}


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
