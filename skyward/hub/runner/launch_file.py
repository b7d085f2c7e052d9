"""Files by which a launcher and its runners agree: the launch, and the folders that attempts share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAUNCH = "launch.json"
PID = "pid"
CODE = "code"
"""Folder of the launcher with unpacked code."""
CHECKPOINT_DIR = "SKYWARD_CHECKPOINT_DIR"
"""Variable that names a job's own folder, the same for each of its attempts. It stays until somebody removes it."""


def read_launch(folder: Path) -> Mapping[str, Any]:
    """Return the launch of the attempt that the runner of a folder runs, or ran last."""
    launch: Mapping[str, Any] = json.loads((folder / LAUNCH).read_text())
    return launch


def write_private(path: Path, content: str | Mapping[str, Any]) -> None:
    """Write a file that only this user may read: text, or JSON. It is whole or not there."""
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content if isinstance(content, str) else json.dumps(content))
    unfinished.replace(path)


def checkpoint_folder(folder: Path, launch: Mapping[str, Any]) -> dict[str, str]:
    """Make the folder of a job's checkpoints where its nodes see this machine's files, and return its variable.

    Args:
        folder: The runner's folder.
        launch: The launch.
    """
    if launch["machines"]["provider"]["type"] != "local":
        return {}
    checkpoints = folder.parent.parent / "checkpoints" / str(launch["job"])
    checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {CHECKPOINT_DIR: str(checkpoints)}
