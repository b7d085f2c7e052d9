"""Counts of all that a hub keeps."""

from __future__ import annotations

from ..._version import __version__
from ..model.status import HubStatus
from .transaction import ReadSnapshot

_COUNTS = {
    "projects": "SELECT count(*) FROM project WHERE deleted_at IS NULL",
    "experiments": "SELECT count(*) FROM experiment",
    "runs": "SELECT count(*) FROM run",
    "deleted_runs": "SELECT count(*) FROM run WHERE lifecycle = 'deleted'",
    "lost_runs": "SELECT count(*) FROM run WHERE state = 'lost' AND lifecycle = 'active'",
    "points": """
        SELECT (SELECT coalesce(sum(points), 0) FROM tail) + (SELECT coalesce(sum(points), 0) FROM chunk)
    """,
    "artifacts": "SELECT count(*) FROM artifact",
    "bytes": "SELECT coalesce(sum(size), 0) FROM (SELECT DISTINCT sha256, size FROM blob) AS content",
}


def count_everything(snapshot: ReadSnapshot) -> HubStatus:
    """Count the rows of all projects. It reads whole tables, so it is for people, not for every second."""
    counts = {name: int(snapshot.execute(sql).fetchone()[0]) for name, sql in _COUNTS.items()}
    return HubStatus(
        version=__version__,
        revision=str(snapshot.execute("SELECT version_num FROM alembic_version").fetchone()[0]),
        database="postgresql" if snapshot.is_postgresql else "sqlite",
        **counts,
    )
