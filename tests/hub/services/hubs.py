"""Small things that tests of the hub's services share."""

from __future__ import annotations

from skyward.hub.model.access import Actor, Role
from skyward.hub.model.points import PointColumns
from skyward.hub.store.database import Database

ADA = Actor(user="ada", organization=1, project=1, role=Role.RESEARCHER)
ADMIN = Actor(user="grace", organization=1, project=1, role=Role.ADMIN)
VIEWER = Actor(user="eve", organization=1, project=1, role=Role.VIEWER)


def columns(*points: tuple[str, int, int, float]) -> PointColumns:
    """Make columns of points (key, step, timestamp, value)."""
    made = PointColumns()
    for point in points:
        made.append(*point)
    return made


def add_project(database: Database, name: str) -> int:
    """Add a project and return its number."""

    def add(tx: object) -> int:
        sql = "INSERT INTO project (organization, name, created_at) VALUES (1, ?, 0) RETURNING id"
        return int(tx.execute(sql, (name,)).fetchone()[0])  # type: ignore[attr-defined]

    return database.write_and_wait(add)
