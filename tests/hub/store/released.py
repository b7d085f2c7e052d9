"""Hubs as earlier releases left them."""

from __future__ import annotations

import tarfile
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"


def released_revisions() -> list[str]:
    """Return the revisions that have an asset."""
    return sorted(path.name.removeprefix("hub-").removesuffix(".tar.gz") for path in ASSETS.glob("hub-*.tar.gz"))


def unpack_hub(revision: str, folder: Path) -> Path:
    """Unpack the hub of a revision, and return its data folder."""
    with tarfile.open(ASSETS / f"hub-{revision}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "hub"
