"""Rows of logged models, their parameters, tags and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..model.registry import LoggedModel, ModelMetric, ModelStatus
from ..model.runs import Lifecycle
from ..model.search import Comparison, Entity, Order
from .keys import find_key, key_ids
from .search import Query
from .tables import PARAM, TAG
from .transaction import ReadSnapshot, Transaction

_COLUMNS = (
    "logged_model.pk, logged_model.id, logged_model.experiment, logged_model.name, logged_model.status,"
    " logged_model.lifecycle, logged_model.owner, logged_model.created_at, logged_model.updated_at,"
    " experiment.artifact_location, logged_model.kind, logged_model.run_id, logged_model.params, logged_model.tags"
)
_SOURCE = "logged_model JOIN experiment ON experiment.id = logged_model.experiment"
_ATTRIBUTES = {
    "name": "logged_model.name",
    "model_id": "logged_model.id",
    "model_type": "logged_model.kind",
    "source_run_id": "logged_model.run_id",
    "experiment_id": "CAST(logged_model.experiment AS TEXT)",
    "status": "logged_model.status",
    "artifact_location": "(coalesce(experiment.artifact_location, 'mlflow-artifacts:/' || experiment.id)"
    " || '/models/' || logged_model.id || '/artifacts')",
    "created": "logged_model.created_at",
    "updated": "logged_model.updated_at",
}
Dataset = tuple[str, str | None]
"""Name and digest of a dataset. No digest: any."""


def find_logged_model(snapshot: ReadSnapshot, project: int, model_id: str) -> LoggedModel | None:
    """Find a logged model, also a deleted one, with its metrics."""
    row = snapshot.execute(
        f"SELECT {_COLUMNS} FROM {_SOURCE} WHERE logged_model.project = ? AND logged_model.id = ?", (project, model_id)
    ).fetchone()
    return _complete(snapshot, [row])[0] if row else None


def _model_of(row: Sequence[Any]) -> LoggedModel:
    location = (row[9] or f"mlflow-artifacts:/{row[2]}").rstrip("/")
    return LoggedModel(
        pk=row[0],
        id=row[1],
        experiment_id=str(row[2]),
        name=row[3],
        status=ModelStatus(row[4]),
        lifecycle=Lifecycle(row[5]),
        owner=row[6],
        created_at=row[7],
        updated_at=row[8],
        artifact_uri=f"{location}/models/{row[1]}/artifacts",
        kind=row[10],
        run_id=row[11],
        params=json.loads(row[12]),
        tags=json.loads(row[13]),
    )


def _complete(snapshot: ReadSnapshot, rows: Sequence[Sequence[Any]]) -> list[LoggedModel]:
    models = [_model_of(row) for row in rows]
    ids = {model.pk: model.id for model in models}
    metrics: dict[int, list[ModelMetric]] = {}
    numbers = sorted(ids)
    for start in range(0, len(numbers), 500):
        part = numbers[start : start + 500]
        for pk, key, value, at, step, run_id, name, digest in snapshot.execute(
            "SELECT m.model, key.name, m.value, m.at, m.step, m.run_id, m.dataset_name, m.dataset_digest"
            " FROM logged_model_metric m JOIN key ON key.id = m.key"
            f" WHERE m.model IN ({', '.join('?' * len(part))}) ORDER BY m.model, key.name, m.at, m.step",
            part,
        ):
            amount = float("nan") if value is None else value
            metrics.setdefault(pk, []).append(ModelMetric(key, amount, at, step, run_id, ids[pk], name, digest))
    return [replace(model, metrics=tuple(metrics.get(model.pk, ()))) for model in models]


def add_logged_model(tx: Transaction, project: int, model: LoggedModel) -> None:
    """Add a logged model with its parameters and tags. One without times is made now."""
    row = tx.execute(
        "INSERT INTO logged_model (project, id, experiment, name, kind, run_id, status, lifecycle, owner, created_at,"
        " updated_at, params, tags) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING pk",
        (
            project,
            model.id,
            int(model.experiment_id),
            model.name,
            model.kind,
            model.run_id,
            model.status.value,
            model.lifecycle.value,
            model.owner,
            model.created_at or tx.now,
            model.updated_at or tx.now,
            json.dumps(dict(model.params)),
            json.dumps(dict(model.tags)),
        ),
    ).fetchone()
    _set_attributes(tx, project, row[0], PARAM, model.params)
    _set_attributes(tx, project, row[0], TAG, model.tags)


def change_logged_model(tx: Transaction, pk: int, **changes: object) -> None:
    """Set columns of a logged model, and the time of its last change."""
    values = {**changes, "updated_at": tx.now}
    assignments = ", ".join(f"{name} = ?" for name in values)
    tx.execute(f"UPDATE logged_model SET {assignments} WHERE pk = ?", (*values.values(), pk))


def set_model_params(tx: Transaction, project: int, pk: int, params: Mapping[str, str]) -> None:
    """Add parameters."""
    _merge(tx, pk, "params", params)
    _set_attributes(tx, project, pk, PARAM, params)


def set_model_tags(tx: Transaction, project: int, pk: int, tags: Mapping[str, str]) -> None:
    """Set tags."""
    _merge(tx, pk, "tags", tags)
    _set_attributes(tx, project, pk, TAG, tags)


def delete_model_tag(tx: Transaction, project: int, pk: int, key: str) -> bool:
    """Remove a tag. Returns whether there was one."""
    tags = _locked(tx, pk, "tags")
    if key not in tags:
        return False
    del tags[key]
    tx.execute("UPDATE logged_model SET tags = ? WHERE pk = ?", (json.dumps(tags), pk))
    number = key_ids(tx, project, [key])[key]
    tx.execute("DELETE FROM logged_model_attribute WHERE model = ? AND kind = ? AND key = ?", (pk, TAG, number))
    return True


def add_model_metrics(tx: Transaction, project: int, pk: int, metrics: Sequence[ModelMetric]) -> None:
    """Add points. The same point again, as clients that retry send it, changes nothing."""
    ids = key_ids(tx, project, {metric.key for metric in metrics})
    tx.execute_many(
        "INSERT INTO logged_model_metric (model, key, at, step, run_id, value, dataset_name, dataset_digest)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (model, key, at, step, run_id) DO UPDATE"
        " SET value = excluded.value, dataset_name = excluded.dataset_name, dataset_digest = excluded.dataset_digest",
        [
            (
                pk,
                ids[metric.key],
                metric.timestamp,
                metric.step,
                metric.run_id,
                None if metric.value != metric.value else metric.value,
                metric.dataset_name,
                metric.dataset_digest,
            )
            for metric in metrics
        ],
    )


def search_logged_models(
    snapshot: ReadSnapshot,
    project: int,
    experiments: Sequence[int],
    comparisons: Sequence[Comparison],
    datasets: Sequence[Dataset],
    orders: Sequence[tuple[Order, Dataset | None]],
    limit: int,
    offset: int,
) -> list[LoggedModel]:
    """Return a page of logged models, the newest first where nothing else is asked."""
    query = Query(snapshot, source=_SOURCE)
    query.where(f"logged_model.experiment IN ({', '.join('?' * len(experiments)) or 'NULL'})", *experiments)
    query.where("logged_model.project = ? AND logged_model.lifecycle = 'active'", project)
    for comparison in comparisons:
        _filter(query, project, comparison, datasets)
    if datasets and all(comparison.entity is not Entity.METRIC for comparison in comparisons):
        condition, values = _of_datasets(datasets)
        query.where(f"EXISTS (SELECT 1 FROM logged_model_metric m WHERE m.model = logged_model.pk{condition})", *values)
    for order, dataset in orders:
        _order(query, project, order, dataset)
    named = {order.key for order, _ in orders if order.entity is Entity.ATTRIBUTE}
    query.orders.extend([] if "created" in named else ["logged_model.created_at DESC"])
    query.orders.extend([] if "model_id" in named else ["logged_model.id ASC"])
    return _complete(snapshot, snapshot.execute(*query.select(_COLUMNS, limit, offset)).fetchall())


def _filter(query: Query, project: int, comparison: Comparison, datasets: Sequence[Dataset]) -> None:
    entity, operator, value = comparison.entity, comparison.operator, comparison.value
    if entity is Entity.ATTRIBUTE:
        condition, values = query.compare(_ATTRIBUTES[comparison.key], operator, value)
        query.where(condition, *values)
        return
    number = find_key(query.snapshot, project, comparison.key) or 0
    if entity is Entity.METRIC:
        condition, values = query.compare("m.value", operator, value)
        suffix, more = _of_datasets(datasets)
        rows = f"SELECT 1 FROM logged_model_metric m WHERE m.model = logged_model.pk AND m.key = {number}"
        query.where(f"EXISTS ({rows} AND {condition}{suffix})", *values, *more)
        return
    kind = PARAM if entity is Entity.PARAM else TAG
    rows = (
        "SELECT 1 FROM logged_model_attribute a"
        f" WHERE a.model = logged_model.pk AND a.kind = {kind} AND a.key = {number}"
    )
    if operator in {"IS NULL", "IS NOT NULL"}:
        query.where(f"{'NOT ' if operator == 'IS NULL' else ''}EXISTS ({rows})")
        return
    condition, values = query.compare("a.value", operator, value)
    query.where(f"EXISTS ({rows} AND {condition})", *values)


def _of_datasets(datasets: Sequence[Dataset]) -> tuple[str, list[object]]:
    if not datasets:
        return "", []
    parts, values = [], list[object]()
    for name, digest in datasets:
        parts.append("m.dataset_name = ?" if digest is None else "(m.dataset_name = ? AND m.dataset_digest = ?)")
        values += [name] if digest is None else [name, digest]
    return f" AND ({' OR '.join(parts)})", values


def _order(query: Query, project: int, order: Order, dataset: Dataset | None) -> None:
    values: list[object] = []
    if order.entity is Entity.ATTRIBUTE:
        column = _ATTRIBUTES[order.key]
        text = "" if order.key in {"created", "updated"} else query.collation
    else:
        number = find_key(query.snapshot, project, order.key) or 0
        suffix, values = _of_datasets([] if dataset is None else [dataset])
        column = (
            "(SELECT m.value FROM logged_model_metric m"
            f" WHERE m.model = logged_model.pk AND m.key = {number}{suffix} ORDER BY m.at DESC, m.step DESC LIMIT 1)"
        )
        text = ""
    query.orders.append(f"(CASE WHEN {column} IS NULL THEN 1 ELSE 0 END)")
    query.orders.append(f"{column}{text} {'DESC' if order.is_descending else 'ASC'}")
    query.order_parameters += [*values, *values]


def _locked(tx: Transaction, pk: int, column: str) -> dict[str, str]:
    row = tx.execute(f"SELECT {column} FROM logged_model WHERE pk = ?{tx.for_update}", (pk,)).fetchone()
    values: dict[str, str] = json.loads(row[0])
    return values


def _merge(tx: Transaction, pk: int, column: str, added: Mapping[str, str]) -> None:
    merged = {**_locked(tx, pk, column), **added}
    tx.execute(f"UPDATE logged_model SET {column} = ? WHERE pk = ?", (json.dumps(merged), pk))


def _set_attributes(tx: Transaction, project: int, pk: int, kind: int, values: Mapping[str, str]) -> None:
    if not values:
        return
    ids = key_ids(tx, project, values.keys())
    tx.execute_many(
        "INSERT INTO logged_model_attribute (model, kind, key, value) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (model, kind, key) DO UPDATE SET value = excluded.value",
        [(pk, kind, ids[name], value) for name, value in values.items()],
    )
