"""Secrets of a project, which the launcher's machine has. The hub knows their names only."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from ...values.secret import Secret

FOLDER = "secrets"
"""Folder beside the runners' that has a folder for each project, with a file for each secret."""


def secrets_of(folder: Path, project: str, names: Sequence[str]) -> dict[str, Secret]:
    """Read secrets for a job of a project.

    Args:
        folder: The runner's folder.
        project: Name of the project.
        names: Names of the secrets, which are those of the variables.

    Raises:
        UsageError: The launcher has none of that name for the project, or others may read it.
    """
    place = folder.parent.parent / FOLDER / project
    return {name: _secret(place, name, project) for name in names}


def _secret(place: Path, name: str, project: str) -> Secret:
    file = place / Secret(name).name  # refuses what is no name of a variable, such as a path
    if place.parent.name != FOLDER or project in ("", ".", ".."):
        raise _unusable(name, f"project {project[:80]!r} has no folder", file)
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise _unusable(name, "others may read its file", file)
        return Secret(name, value=file.read_text().rstrip("\n"))
    except FileNotFoundError:
        raise _unusable(name, f"this launcher has none for project {project}", file) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(name, f"cannot be read ({error})", file) from None


def _unusable(name: str, problem: str, file: Path) -> UsageError:
    return UsageError(f"secrets={name}: {problem}; write its value to {file}, mode 600", field="secrets")
