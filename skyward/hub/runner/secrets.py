"""Secrets of a project, which the launcher's machine has. The hub knows their names only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...values.secret import Secret
from ..store.secret_files import FOLDER, read_secret


def secrets_of(folder: Path, project: str, names: Sequence[str]) -> dict[str, Secret]:
    """Read secrets for a job of a project.

    Args:
        folder: The runner's folder.
        project: Name of the project.
        names: Names of the secrets, which are those of the variables.

    Raises:
        UsageError: The launcher has none of that name for the project, or others may read it.
    """
    place = folder.parent.parent / FOLDER
    return {name: Secret(name, value=read_secret(place, project, name)) for name in names}
