"""What a node says of itself: lines of a name and a text, from the scripts that run there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

__all__ = ["Environment", "Facts", "read_facts"]

_MARK = "\1"
_NEWLINE, _NUL = "\2", "\3"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One that is whole. `path`: the sys.path of its interpreter, as site has made it there."""

    python: str
    version: str
    path: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Empty where it is not known. `is_whole`: the script came to its end; `problem`: what stopped it, in words."""

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
    """By name."""
    uvs: tuple[tuple[str, str], ...] = ()
    """(version, path)"""
    pythons: tuple[tuple[str, str], ...] = ()
    """(version, path); CPython only."""
    missing_objects: tuple[str, ...] = ()
    """Of the user's code."""
    missing_apt: tuple[str, ...] = ()
    is_unpacked: bool = False
    """The user's code is in the pool's folder."""
    variables: dict[str, str] = field(default_factory=dict)
    failed_variables: dict[str, int] = field(default_factory=dict)
    """Exit codes."""
    environ: dict[str, str] = field(default_factory=dict, repr=False)
    problem: str = ""
    is_whole: bool = False

    def updated(self, later: Facts) -> Facts:
        """With what a later script has found out."""
        return replace(
            self,
            ours=later.ours or self.ours,
            users={**self.users, **later.users},
            folder=later.folder or self.folder,
            variables={**self.variables, **later.variables},
        )


def read_facts(lines: Iterable[str]) -> Facts:
    """Other lines are passed over: a login shell may print whatever it likes."""
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
