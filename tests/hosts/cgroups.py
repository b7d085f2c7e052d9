"""Separate control groups for each host.

systemd-nspawn puts a system below the group that it was started in. Hosts that share a group remove each other's while
they boot. Then a unit fails, or sshd never comes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["entering", "remove"]

_ROOT = Path("/sys/fs/cgroup")
_NAME = "skyward-tests"
# `systemd-nspawn` takes the pid of the shell, and so its groups.
_ENTER = 'for group in $1; do echo $$ >"$group/cgroup.procs"; done; shift; exec "$@"'


def entering(machine: str) -> list[str]:
    """Return what to put in front of the command that starts it, or nothing if no groups can be made."""
    remove(machine)
    made = []
    for hierarchy in _hierarchies():
        group = hierarchy / _NAME / machine
        with suppress(OSError):
            _make(group)
            made.append(str(group))
    return ["sh", "-c", _ENTER, "sh", " ".join(made)] if made else []


def _make(group: Path) -> None:
    """Make the group, and the one above it, which another session may be removing."""
    for _ in range(100):
        with suppress(FileNotFoundError):
            group.mkdir(parents=True, exist_ok=True)
            return
    group.mkdir(parents=True)


def remove(pattern: str) -> None:
    """Remove the groups of matching machines in which nothing runs."""
    for hierarchy in _hierarchies():
        groups: list[Path] = []
        with suppress(OSError):  # another session may be removing the folder above
            groups += (hierarchy / _NAME).glob(pattern)
        for group in groups:
            for folder, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):
                    os.rmdir(folder)
        with suppress(OSError):  # others are there
            (hierarchy / _NAME).rmdir()


def _hierarchies() -> Iterator[Path]:
    """Return the hierarchies in which systemd keeps its units: of version 2, or its own of version 1, or both."""
    for folder in (_ROOT, _ROOT / "unified", _ROOT / "systemd"):
        if (folder / "cgroup.procs").exists():
            yield folder
