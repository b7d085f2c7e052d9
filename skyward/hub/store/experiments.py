"""Rows of experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.runs import Experiment, Lifecycle
from .transaction import ReadSnapshot, Transaction

COLUMNS = "id, name, artifact_location, lifecycle, created_at, updated_at, tags, owner"


def experiment_of(row: Sequence[Any]) -> Experiment:
    """Make the value from a row of `COLUMNS`."""
    return Experiment(
        id=str(row[0]),
        name=row[1],
        artifact_location=row[2] or f"mlflow-artifacts:/{row[0]}",
        lifecycle=Lifecycle(row[3]),
        created_at=row[4],
        updated_at=row[5],
        tags=json.loads(row[6]),
        owner=row[7],
    )


def find_experiment(snapshot: ReadSnapshot, project: int, number: int) -> Experiment | None:
    row = snapshot.execute(
        f"SELECT {COLUMNS} FROM experiment WHERE project = ? AND id = ?", (project, number)
    ).fetchone()
    return experiment_of(row) if row else None


def find_experiment_named(snapshot: ReadSnapshot, project: int, name: str) -> Experiment | None:
    row = snapshot.execute(
        f"SELECT {COLUMNS} FROM experiment WHERE project = ? AND name = ?", (project, name)
    ).fetchone()
    return experiment_of(row) if row else None


def add_experiment(
    tx: Transaction, project: int, name: str, owner: str, artifact_location: str | None, tags: Mapping[str, str]
) -> int | None:
    """Add an experiment and return its id, or None where the name is taken."""
    row = tx.execute(
        "INSERT INTO experiment (project, name, owner, artifact_location, lifecycle, created_at, updated_at, tags)"
        " VALUES (?, ?, ?, ?, 'active', ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id",
        (project, name, owner, artifact_location, tx.now, tx.now, json.dumps(tags)),
    ).fetchone()
    if row is None:
        return None
    _add_tags(tx, row[0], tags)
    return int(row[0])


def rename_experiment(tx: Transaction, number: int, name: str) -> None:
    tx.execute("UPDATE experiment SET name = ?, updated_at = ? WHERE id = ?", (name, tx.now, number))


def set_experiment_lifecycle(tx: Transaction, number: int, lifecycle: Lifecycle) -> None:
    """Move an experiment and its runs into the bin, or out of it."""
    deleted_at = tx.now if lifecycle is Lifecycle.DELETED else None
    tx.execute(
        "UPDATE experiment SET lifecycle = ?, updated_at = ?, deleted_at = ? WHERE id = ?",
        (lifecycle.value, tx.now, deleted_at, number),
    )
    tx.execute(
        "UPDATE run SET lifecycle = ?, deleted_at = ? WHERE experiment = ? AND lifecycle <> ?",
        (lifecycle.value, deleted_at, number, lifecycle.value),
    )


def change_experiment_tags(tx: Transaction, number: int, added: Mapping[str, str], removed: Sequence[str] = ()) -> bool:
    """Set and remove tags. Returns False, and changes nothing, where one of `removed` is missing."""
    row = tx.execute(f"SELECT tags FROM experiment WHERE id = ?{tx.for_update}", (number,)).fetchone()
    tags: dict[str, str] = json.loads(row[0])
    if any(key not in tags for key in removed):
        return False
    tags.update(added)
    for key in removed:
        del tags[key]
        tx.execute("DELETE FROM experiment_tag WHERE experiment = ? AND key = ?", (number, key))
    _add_tags(tx, number, added)
    tx.execute("UPDATE experiment SET tags = ?, updated_at = ? WHERE id = ?", (json.dumps(tags), tx.now, number))
    return True


def _add_tags(tx: Transaction, number: int, tags: Mapping[str, str]) -> None:
    if tags:
        tx.execute_many(
            "INSERT INTO experiment_tag (experiment, key, value) VALUES (?, ?, ?)"
            " ON CONFLICT (experiment, key) DO UPDATE SET value = excluded.value",
            [(number, key, value) for key, value in tags.items()],
        )
