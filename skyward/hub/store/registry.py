"""Rows of registered models, their versions, tags and aliases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..model.registry import ModelVersion, RegisteredModel, Stage
from .transaction import ReadSnapshot, Transaction

MODEL_COLUMNS = (
    "registered_model.id, registered_model.name, registered_model.owner, registered_model.created_at,"
    " registered_model.updated_at, registered_model.description, registered_model.tags"
)
VERSION_COLUMNS = (
    "registered_model.name, v.version, v.stage, v.source, v.location, v.created_at, v.updated_at, v.owner,"
    " v.description, v.run_id, v.run_link, v.tags"
)
VERSIONS = "model_version v JOIN registered_model ON registered_model.id = v.model"


def version_of(row: Sequence[Any]) -> ModelVersion:
    """Make the value from a row of `VERSION_COLUMNS`."""
    name, version, stage, source, location, created_at, updated_at, owner, description, run_id, run_link, tags = row
    return ModelVersion(
        name=name,
        version=version,
        stage=Stage(stage),
        source=source,
        location=location,
        created_at=created_at,
        updated_at=updated_at,
        owner=owner,
        description=description,
        run_id=run_id,
        run_link=run_link,
        tags=json.loads(tags),
    )


def find_model(snapshot: ReadSnapshot, project: int, name: str) -> RegisteredModel | None:
    """Find a model without its aliases and versions."""
    row = snapshot.execute(
        f"SELECT {MODEL_COLUMNS} FROM registered_model WHERE project = ? AND name = ?", (project, name)
    ).fetchone()
    return _model_of(row) if row else None


def load_models(snapshot: ReadSnapshot, rows: Sequence[Sequence[Any]]) -> list[RegisteredModel]:
    """Make models from rows of `MODEL_COLUMNS`, with aliases and the newest version of each stage."""
    models: list[RegisteredModel] = []
    for start in range(0, len(rows), 500):
        models += _complete(snapshot, [_model_of(row) for row in rows[start : start + 500]])
    return models


def load_model(snapshot: ReadSnapshot, project: int, name: str) -> RegisteredModel | None:
    """Load a model with its aliases and the newest version of each stage."""
    model = find_model(snapshot, project, name)
    return _complete(snapshot, [model])[0] if model else None


def _model_of(row: Sequence[Any]) -> RegisteredModel:
    number, name, owner, created_at, updated_at, description, tags = row
    return RegisteredModel(number, name, owner, created_at, updated_at, description, json.loads(tags))


def _complete(snapshot: ReadSnapshot, models: list[RegisteredModel]) -> list[RegisteredModel]:
    ids = [model.id for model in models]
    marks = ", ".join("?" * len(ids))
    aliases: dict[int, dict[str, int]] = {}
    for number, alias, version in snapshot.execute(
        f"SELECT model, alias, version FROM model_alias WHERE model IN ({marks}) ORDER BY model, alias", ids
    ):
        aliases.setdefault(number, {})[alias] = version
    latest: dict[str, list[ModelVersion]] = {}
    rows = snapshot.execute(
        f"SELECT {VERSION_COLUMNS} FROM (SELECT model, MAX(version) AS newest, MIN(version) AS first FROM model_version"
        f" WHERE model IN ({marks}) AND deleted_at IS NULL GROUP BY model, stage) latest"
        " JOIN model_version v ON v.model = latest.model AND v.version = latest.newest"
        " JOIN registered_model ON registered_model.id = v.model ORDER BY v.model, latest.first",
        ids,
    )
    for row in rows:
        latest.setdefault(row[0], []).append(version_of(row))
    return [
        replace(model, aliases=aliases.get(model.id, {}), latest=tuple(latest.get(model.name, ()))) for model in models
    ]


def add_model(
    tx: Transaction, project: int, name: str, owner: str, description: str | None, tags: Mapping[str, str]
) -> int | None:
    """Add a model and return its number, or None where the name is taken."""
    row = tx.execute(
        "INSERT INTO registered_model (project, name, owner, description, created_at, updated_at, tags)"
        " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id",
        (project, name, owner, description, tx.now, tx.now, json.dumps(dict(tags))),
    ).fetchone()
    if row is None:
        return None
    _add_model_tags(tx, row[0], tags)
    return int(row[0])


def change_model(tx: Transaction, number: int, **changes: object) -> None:
    """Set columns of a model, and the time of its last change."""
    values = {"updated_at": tx.now, **changes}
    assignments = ", ".join(f"{name} = ?" for name in values)
    tx.execute(f"UPDATE registered_model SET {assignments} WHERE id = ?", (*values.values(), number))


def touch_versions(tx: Transaction, number: int) -> None:
    """Set the time of the last change of all versions of a model."""
    tx.execute("UPDATE model_version SET updated_at = ? WHERE model = ?", (tx.now, number))


def delete_model(tx: Transaction, number: int) -> None:
    """Delete a model with all that belongs to it."""
    for table in ("model_alias", "model_version_tag", "model_version", "registered_model_tag"):
        tx.execute(f"DELETE FROM {table} WHERE model = ?", (number,))
    tx.execute("DELETE FROM registered_model WHERE id = ?", (number,))


def change_model_tags(tx: Transaction, number: int, added: Mapping[str, str], removed: Sequence[str] = ()) -> None:
    """Set and remove tags of a model. Missing ones are no mistake, as in MLflow."""
    row = tx.execute(f"SELECT tags FROM registered_model WHERE id = ?{tx.for_update}", (number,)).fetchone()
    tags = _changed(row[0], added, removed)
    tx.execute("UPDATE registered_model SET tags = ? WHERE id = ?", (tags, number))
    for key in removed:
        tx.execute("DELETE FROM registered_model_tag WHERE model = ? AND key = ?", (number, key))
    _add_model_tags(tx, number, added)


def find_version(snapshot: ReadSnapshot, model: RegisteredModel, version: int) -> ModelVersion | None:
    """Find a version that is not deleted, with its aliases."""
    row = snapshot.execute(
        f"SELECT {VERSION_COLUMNS} FROM {VERSIONS} WHERE v.model = ? AND v.version = ? AND v.deleted_at IS NULL",
        (model.id, version),
    ).fetchone()
    if row is None:
        return None
    aliases = snapshot.execute(
        "SELECT alias FROM model_alias WHERE model = ? AND version = ? ORDER BY alias", (model.id, version)
    ).fetchall()
    return replace(version_of(row), aliases=tuple(alias for (alias,) in aliases))


def add_version(tx: Transaction, project: int, model: RegisteredModel, version: ModelVersion) -> int:
    """Add a version and return its number: its own, or one more than the greatest that the model ever had."""
    tx.execute(f"SELECT id FROM registered_model WHERE id = ?{tx.for_update}", (model.id,))
    number = version.version or last_number(tx, model.id) + 1
    tx.execute(
        "INSERT INTO model_version (model, version, project, stage, owner, description, source, location, run_id,"
        " run_link, created_at, updated_at, tags) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            model.id,
            number,
            project,
            version.stage.value,
            version.owner,
            version.description,
            version.source,
            version.location,
            version.run_id,
            version.run_link,
            version.created_at,
            version.updated_at,
            json.dumps(dict(version.tags)),
        ),
    )
    _add_version_tags(tx, model.id, number, version.tags)
    return number


def last_number(snapshot: ReadSnapshot, model: int) -> int:
    """Return the greatest number of a version that a model ever had."""
    row = snapshot.execute("SELECT coalesce(MAX(version), 0) FROM model_version WHERE model = ?", (model,)).fetchone()
    return int(row[0])


def made_at(snapshot: ReadSnapshot, model: int, version: int) -> int | None:
    """Return when a version was made, also where it is deleted. None: no version has this number."""
    row = snapshot.execute(
        "SELECT created_at FROM model_version WHERE model = ? AND version = ?", (model, version)
    ).fetchone()
    return int(row[0]) if row else None


def change_version(tx: Transaction, model: int, version: int, **changes: object) -> None:
    """Set columns of a version, and the time of its last change."""
    values = {**changes, "updated_at": tx.now}
    assignments = ", ".join(f"{name} = ?" for name in values)
    tx.execute(
        f"UPDATE model_version SET {assignments} WHERE model = ? AND version = ?", (*values.values(), model, version)
    )


def archive_others(tx: Transaction, model: int, version: int, stage: Stage) -> None:
    """Archive the other versions of a stage."""
    tx.execute(
        "UPDATE model_version SET stage = 'archived', updated_at = ?"
        " WHERE model = ? AND stage = ? AND version <> ? AND deleted_at IS NULL",
        (tx.now, model, stage.value, version),
    )


def delete_version(tx: Transaction, model: int, version: int) -> None:
    """Hide a version for good, and forget what it pointed to. Its number stays used."""
    tx.execute("DELETE FROM model_alias WHERE model = ? AND version = ?", (model, version))
    change_version(tx, model, version, deleted_at=tx.now, description=None, source="", location="", run_id=None)


def change_version_tags(
    tx: Transaction, model: int, version: int, added: Mapping[str, str], removed: Sequence[str] = ()
) -> None:
    """Set and remove tags of a version."""
    where = "WHERE model = ? AND version = ?"
    row = tx.execute(f"SELECT tags FROM model_version {where}{tx.for_update}", (model, version)).fetchone()
    tags = _changed(row[0], added, removed)
    tx.execute(f"UPDATE model_version SET tags = ? {where}", (tags, model, version))
    for key in removed:
        tx.execute(f"DELETE FROM model_version_tag {where} AND key = ?", (model, version, key))
    _add_version_tags(tx, model, version, added)


def set_alias(tx: Transaction, model: int, alias: str, version: int) -> None:
    """Let an alias name a version."""
    tx.execute(
        "INSERT INTO model_alias (model, alias, version) VALUES (?, ?, ?)"
        " ON CONFLICT (model, alias) DO UPDATE SET version = excluded.version",
        (model, alias, version),
    )


def delete_alias(tx: Transaction, model: int, alias: str) -> None:
    tx.execute("DELETE FROM model_alias WHERE model = ? AND alias = ?", (model, alias))


def find_alias(snapshot: ReadSnapshot, model: int, alias: str) -> int | None:
    """Return the version that an alias names."""
    row = snapshot.execute("SELECT version FROM model_alias WHERE model = ? AND alias = ?", (model, alias)).fetchone()
    return int(row[0]) if row else None


def _changed(text: str, added: Mapping[str, str], removed: Sequence[str]) -> str:
    tags: dict[str, str] = json.loads(text)
    tags.update(added)
    for key in removed:
        tags.pop(key, None)
    return json.dumps(tags)


def _add_model_tags(tx: Transaction, number: int, tags: Mapping[str, str]) -> None:
    if tags:
        tx.execute_many(
            "INSERT INTO registered_model_tag (model, key, value) VALUES (?, ?, ?)"
            " ON CONFLICT (model, key) DO UPDATE SET value = excluded.value",
            [(number, key, value) for key, value in tags.items()],
        )


def _add_version_tags(tx: Transaction, model: int, version: int, tags: Mapping[str, str]) -> None:
    if tags:
        tx.execute_many(
            "INSERT INTO model_version_tag (model, version, key, value) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (model, version, key) DO UPDATE SET value = excluded.value",
            [(model, version, key, value) for key, value in tags.items()],
        )
