"""Rows of runs, with their parameters, tags, inputs and latest metrics."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..model.quotas import Quota
from ..model.runs import DatasetInput, LatestMetric, Lifecycle, ModelLink, Run, RunState
from . import quotas
from .keys import key_ids
from .tables import PARAM, TAG
from .transaction import ReadSnapshot, Transaction

COLUMNS = (
    "run.pk, run.id, run.experiment, run.name, run.state, run.lifecycle, run.owner, run.started_at, run.ended_at,"
    " run.heartbeat_at, run.error, run.params, run.tags"
)
_ROW = "pk, project, id, experiment, lifecycle, state, owner, heartbeat_at"
_LOOK_UP = f"SELECT {_ROW} FROM run JOIN unnest(?::int8[], ?::text[]) AS asked (project, id) USING (project, id)"


@dataclass(frozen=True, slots=True)
class RunRow:
    """Facts about a run that each change of it needs."""

    pk: int
    project: int
    id: str
    experiment: int
    lifecycle: str
    state: str
    owner: str
    heartbeat_at: int | None


def find_run(snapshot: ReadSnapshot, project: int, run_id: str) -> RunRow | None:
    """Find a run without its parameters and tags. This is on the path of each logged point."""
    row = snapshot.known_runs.get((project, run_id))
    if row is None:
        sql = f"SELECT {_ROW} FROM run WHERE project = ? AND id = ?"
        row = snapshot.execute(sql, (project, run_id)).fetchone()
    return RunRow(*row) if row else None


def look_up(tx: Transaction, names: Collection[tuple[int, str]]) -> None:
    """Read the rows of runs for `find_run` at once, up to the first change by the transaction.

    A round trip to PostgreSQL for each request took as long as writing its points.
    """
    legal = sorted(name for name in names if name[1].isascii() and name[1].isprintable())
    if tx.is_postgresql and len(legal) > 1:
        for row in tx.execute(_LOOK_UP, [list(column) for column in zip(*legal, strict=True)]):
            tx.known_runs[row[1], row[2]] = row


def load_run(snapshot: ReadSnapshot, project: int, run_id: str) -> Run | None:
    """Load a run with all that belongs to it, except histories and artifacts."""
    row = snapshot.execute(f"SELECT {COLUMNS} FROM run WHERE project = ? AND id = ?", (project, run_id)).fetchone()
    return hydrate(snapshot, [row])[0] if row else None


def hydrate(snapshot: ReadSnapshot, rows: Sequence[Sequence[Any]]) -> list[Run]:
    """Make runs from rows of `COLUMNS`, with one query for each kind of thing that belongs to them."""
    if not rows:
        return []
    metrics: dict[int, list[LatestMetric]] = {}
    inputs: dict[int, list[DatasetInput]] = {}
    models: dict[int, list[ModelLink]] = {}
    locations: dict[int, str] = {}
    for start in range(0, len(rows), 500):
        part = rows[start : start + 500]
        _load_metrics(snapshot, [row[0] for row in part], metrics)
        _load_inputs(snapshot, [row[0] for row in part], inputs)
        _load_models(snapshot, [row[0] for row in part], models)
    _load_locations(snapshot, {row[2] for row in rows}, locations)
    return [
        replace(
            _run_of(row, locations[row[2]]),
            metrics=metrics.get(row[0], ()),
            inputs=inputs.get(row[0], ()),
            models=models.get(row[0], ()),
        )
        for row in rows
    ]


def add_run(tx: Transaction, project: int, run: Run) -> int | None:
    """Add a run with its parameters and tags. Returns its number, or None where the id is taken.

    Raises:
        Refusal: The project has no room for another one.
    """
    row = tx.execute(
        "INSERT INTO run (project, id, experiment, name, state, lifecycle, owner, started_at, ended_at, heartbeat_at,"
        " error, params, tags) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING pk",
        (
            project,
            run.id,
            int(run.experiment_id),
            run.name,
            run.state.value,
            run.lifecycle.value,
            run.user,
            run.started_at,
            run.ended_at,
            run.heartbeat_at,
            run.error,
            json.dumps(dict(run.params)),
            json.dumps(dict(run.tags)),
        ),
    ).fetchone()
    if row is None:
        return None
    quotas.charge(tx, project, Quota.RUNS, 1)
    _set_attributes(tx, project, row[0], PARAM, run.params)
    _set_attributes(tx, project, row[0], TAG, run.tags)
    return int(row[0])


def change_run(tx: Transaction, pk: int, **changes: object) -> None:
    """Set columns of a run's row. The names are those of `tables.run`."""
    assignments = ", ".join(f"{name} = ?" for name in changes)
    tx.execute(f"UPDATE run SET {assignments} WHERE pk = ?", (*changes.values(), pk))


def set_run_lifecycle(tx: Transaction, pk: int, lifecycle: Lifecycle) -> None:
    change_run(tx, pk, lifecycle=lifecycle.value, deleted_at=tx.now if lifecycle is Lifecycle.DELETED else None)


def mark_lost(tx: Transaction, before: int) -> list[tuple[int, int, str]]:
    """Mark runs whose last heartbeat is older than `before`. Returns organization, project and id of each."""
    rows = tx.execute(
        "UPDATE run SET state = 'lost' WHERE state = 'running' AND heartbeat_at IS NOT NULL AND heartbeat_at < ?"
        " AND lifecycle = 'active' RETURNING project, id",
        (before,),
    ).fetchall()
    organizations = dict(tx.execute("SELECT id, organization FROM project").fetchall()) if rows else {}
    return [(organizations[project], project, run_id) for project, run_id in rows]


def add_params(tx: Transaction, project: int, pk: int, params: Mapping[str, str]) -> tuple[str, str] | None:
    """Add parameters. Returns the first one that the run has with another value, and that value. Then none is added."""
    present = _locked(tx, pk, "params")
    for name, value in params.items():
        if present.get(name, value) != value:
            return name, present[name]
    new = {name: value for name, value in params.items() if name not in present}
    if new:
        change_run(tx, pk, params=json.dumps({**present, **new}))
        _set_attributes(tx, project, pk, PARAM, new)
    return None


def change_tags(tx: Transaction, project: int, pk: int, added: Mapping[str, str], removed: Sequence[str] = ()) -> bool:
    """Set and remove tags. Returns False, and changes nothing, where one of `removed` is missing."""
    tags = _locked(tx, pk, "tags")
    if any(name not in tags for name in removed):
        return False
    tags.update(added)
    for name in removed:
        tags.pop(name, None)
    change_run(tx, pk, tags=json.dumps(tags))
    _set_attributes(tx, project, pk, TAG, added)
    for number in key_ids(tx, project, removed).values():
        tx.execute("DELETE FROM attribute WHERE run = ? AND kind = ? AND key = ?", (pk, TAG, number))
    return True


def add_inputs(tx: Transaction, pk: int, inputs: Sequence[DatasetInput], models: Sequence[ModelLink]) -> None:
    """Add datasets and models of a run. Known ones stay as they are."""
    if inputs:
        tx.execute_many(
            "INSERT INTO input (run, name, digest, source_type, source, schema, profile, context, tags)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            [
                (
                    pk,
                    item.name,
                    item.digest,
                    item.source_type,
                    item.source,
                    item.schema,
                    item.profile,
                    item.tags.get("mlflow.data.context"),
                    json.dumps(dict(item.tags)),
                )
                for item in inputs
            ],
        )
    if models:
        tx.execute_many(
            "INSERT INTO model_link (run, direction, model_id, step) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            [(pk, link.direction, link.model_id, link.step) for link in models],
        )


def _locked(tx: Transaction, pk: int, column: str) -> dict[str, str]:
    row = tx.execute(f"SELECT {column} FROM run WHERE pk = ?{tx.for_update}", (pk,)).fetchone()
    values: dict[str, str] = json.loads(row[0])
    return values


def _set_attributes(tx: Transaction, project: int, pk: int, kind: int, values: Mapping[str, str]) -> None:
    if not values:
        return
    ids = key_ids(tx, project, values.keys())
    tx.execute_many(
        "INSERT INTO attribute (run, kind, key, value) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (run, kind, key) DO UPDATE SET value = excluded.value",
        [(pk, kind, ids[name], value) for name, value in values.items()],
    )


def _run_of(row: Sequence[Any], location: str) -> Run:
    return Run(
        id=row[1],
        experiment_id=str(row[2]),
        name=row[3],
        state=RunState(row[4]),
        lifecycle=Lifecycle(row[5]),
        user=row[6],
        started_at=row[7],
        ended_at=row[8],
        artifact_uri=f"{location.rstrip('/')}/{row[1]}/artifacts",
        heartbeat_at=row[9],
        error=row[10],
        params=json.loads(row[11]),
        tags=json.loads(row[12]),
    )


def _load_metrics(snapshot: ReadSnapshot, pks: list[int], metrics: dict[int, list[LatestMetric]]) -> None:
    marks = ", ".join("?" * len(pks))
    rows = snapshot.execute(
        "SELECT latest.run, key.name, latest.value, latest.step, latest.at FROM latest"
        f" JOIN key ON key.id = latest.key WHERE latest.run IN ({marks})",
        pks,
    )
    for pk, name, value, step, at in rows:
        metrics.setdefault(pk, []).append(LatestMetric(name, float("nan") if value is None else value, step, at))
    for items in metrics.values():
        items.sort(key=lambda metric: metric.key)


def _load_inputs(snapshot: ReadSnapshot, pks: list[int], inputs: dict[int, list[DatasetInput]]) -> None:
    marks = ", ".join("?" * len(pks))
    rows = snapshot.execute(
        "SELECT run, name, digest, source_type, source, schema, profile, tags FROM input"
        f" WHERE run IN ({marks}) ORDER BY run, name, digest",
        pks,
    )
    for pk, name, digest, source_type, source, schema, profile, tags in rows:
        item = DatasetInput(name, digest, source_type, source, schema, profile, json.loads(tags))
        inputs.setdefault(pk, []).append(item)


def _load_models(snapshot: ReadSnapshot, pks: list[int], models: dict[int, list[ModelLink]]) -> None:
    marks = ", ".join("?" * len(pks))
    rows = snapshot.execute(
        f"SELECT run, model_id, direction, step FROM model_link WHERE run IN ({marks}) ORDER BY run, step, model_id",
        pks,
    )
    for pk, model_id, direction, step in rows:
        models.setdefault(pk, []).append(ModelLink(model_id, direction, step))


def _load_locations(snapshot: ReadSnapshot, experiments: set[int], locations: dict[int, str]) -> None:
    numbers = sorted(experiments)
    for start in range(0, len(numbers), 500):
        part = numbers[start : start + 500]
        marks = ", ".join("?" * len(part))
        for number, location in snapshot.execute(
            f"SELECT id, artifact_location FROM experiment WHERE id IN ({marks})", part
        ):
            locations[number] = location or f"mlflow-artifacts:/{number}"
