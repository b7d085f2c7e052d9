"""Secrets as files: a folder for each project, and in it a file for each secret that only this user may read."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from ...errors import UsageError

FOLDER = "secrets"
"""Folder beside the runners' that holds those of a launcher."""
LARGEST = 64 * 1024
"""Bytes of a secret, which becomes a variable of a process."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_PROJECT = re.compile(r"[^/\0]{1,200}")


def read_secret(folder: Path, project: str, name: str) -> str:
    """Return a secret of a project.

    Raises:
        UsageError: There is none of that name, or others may read its file.
    """
    file = _file(folder, project, name)
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise _unusable(name, "others may read its file", project)
        return file.read_text().rstrip("\n")
    except FileNotFoundError:
        raise _unusable(name, f"this machine has none for project {project}", project) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(name, f"cannot be read ({error})", project) from None


def write_secret(folder: Path, project: str, name: str, value: str) -> None:
    """Write a secret of a project, in place of an earlier one. It is whole or not there.

    Raises:
        UsageError: The name or the value is illegal, or it cannot be written.
    """
    file = _file(folder, project, name)
    if not value or "\0" in value or len(value.encode()) > LARGEST:
        raise UsageError(f"secret={name!r}: empty, with a NUL, or above {LARGEST} bytes; give a text", field="secret")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=file.parent, prefix=".")  # mode 600
        try:
            with os.fdopen(descriptor, "w") as opened:
                opened.write(value)
            Path(unfinished).replace(file)
        except OSError:
            Path(unfinished).unlink(missing_ok=True)  # no part of a secret stays behind
            raise
    except OSError as error:
        raise UsageError(f"secret={name!r}: cannot be written: {error}; check the folder", field="secret") from None


def remove_secret(folder: Path, project: str, name: str) -> None:
    """Remove a secret of a project.

    Raises:
        UsageError: There is none of that name.
    """
    try:
        _file(folder, project, name).unlink()
    except OSError:
        raise _unusable(name, f"this machine has none for project {project}", project) from None


def secret_names(folder: Path, project: str) -> list[str]:
    """Return the names of the secrets of a project, sorted."""
    place = _file(folder, project, "NAME").parent
    return sorted(file.name for file in place.iterdir() if _NAME.fullmatch(file.name)) if place.is_dir() else []


def _file(folder: Path, project: str, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise UsageError(f"secret={name[:40]!r}: not the name of a variable; use letters, digits and '_'")
    if not _PROJECT.fullmatch(project) or project in (".", ".."):
        raise UsageError(f"project={project[:80]!r}: has no folder; use another name")
    return folder / project / name


def _unusable(name: str, problem: str, project: str) -> UsageError:
    return UsageError(
        f"secrets={name}: {problem}; run `skyward hub secret set {name} --project {project}` there", field="secrets"
    )
