"""Deletion for good: runs, models, experiments and projects deleted long ago, and bytes that nothing names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import journal, quotas
from .blobs import Blobs
from .database import Database
from .registry_tables import metadata
from .tables import INTEGER
from .transaction import ReadSnapshot, Transaction

KEPT_DAYS = 30
_RUNS = 200
"""Runs that one transaction deletes, so that writers of a server wait for little."""
_MODELS = 200
_ACTOR = "skyward hub gc"
# A version of a model in the registry needs the files of its run or its logged model, whoever deleted those.
_NAMES_RUN = (
    "EXISTS (SELECT 1 FROM model_version WHERE model_version.project = run.project"
    " AND model_version.deleted_at IS NULL AND (model_version.run_id = run.id"
    # The same files by their URL, such as https://hub/v1/runs/ID/artifacts/model.
    " OR replace(location, '/' || run.id || '/artifacts', '') <> location))"
)
_NAMES_MODEL = (
    "EXISTS (SELECT 1 FROM model_version WHERE model_version.project = logged_model.project"
    " AND model_version.deleted_at IS NULL"
    " AND replace(location, '/models/' || logged_model.id || '/artifacts', '') <> location)"
)
_OLD_PROJECT = "project IN (SELECT old.id FROM project AS old WHERE old.deleted_at < ?)"
_OLD_RUNS = f"((deleted_at < ? AND NOT {_NAMES_RUN}) OR run.{_OLD_PROJECT})"
# A deleted one never changes again, so the time of its last change is that of its deletion.
_OLD_MODELS = f"((lifecycle = 'deleted' AND updated_at < ? AND NOT {_NAMES_MODEL}) OR logged_model.{_OLD_PROJECT})"
_OLD_EXPERIMENTS = (
    "((deleted_at < ? AND id <> 0 AND NOT EXISTS (SELECT 1 FROM run"
    f" WHERE run.experiment = experiment.id AND (run.deleted_at IS NULL OR run.deleted_at >= ? OR {_NAMES_RUN}))"
    f" AND NOT EXISTS (SELECT 1 FROM logged_model WHERE logged_model.experiment = experiment.id AND {_NAMES_MODEL}))"
    f" OR experiment.{_OLD_PROJECT})"
)
# Children first. Runs, logged models and experiments have conditions of their own, and are gone before.
_REGISTRY_OF_PROJECT = (
    *(
        f"DELETE FROM {name} WHERE model IN (SELECT id FROM registered_model WHERE project = ?)"
        for name in ("model_alias", "model_version_tag", "model_version", "registered_model_tag")
    ),
    "DELETE FROM registered_model WHERE project = ?",
)
_JOBS = "(SELECT pk FROM job WHERE project = ?)"
_JOBS_OF_PROJECT = (
    *(
        f"DELETE FROM {name} WHERE attempt IN (SELECT pk FROM attempt WHERE job IN {_JOBS})"
        for name in ("job_output", "job_items")
    ),
    f"DELETE FROM attempt WHERE job IN {_JOBS}",
    f"DELETE FROM job_after WHERE job IN {_JOBS}",
    f"DELETE FROM job_blob WHERE job IN {_JOBS}",
    f"DELETE FROM delivery WHERE job IN {_JOBS}",
    "DELETE FROM job WHERE project = ?",
    *(f"DELETE FROM {name} WHERE project = ?" for name in ("device_use", "job_spending", "job_use", "job_end")),
)
_REST_OF_PROJECT = (
    "DELETE FROM pool_event WHERE pool IN (SELECT pk FROM pool WHERE project = ?)",
    *(
        f"DELETE FROM {name} WHERE sweep IN (SELECT id FROM sweep WHERE project = ?)"
        for name in ("trial_step", "trial")
    ),
    *(
        f"DELETE FROM {name} WHERE project = ?"
        for name in ("pool", "sweep", "key", "membership", "token", "event", "quota")
    ),
    "DELETE FROM project WHERE id = ?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """Counts of what was deleted, or would be.

    Attributes:
        runs: Runs with their points and artifacts.
        logged_models: Logged models of these runs and experiments, and those that were in the bin themselves.
        experiments: Experiments without runs.
        projects: Projects, of which the audit stays.
        blobs: Blobs that nothing names.
        bytes: Their bytes.
    """

    runs: int
    logged_models: int
    experiments: int
    projects: int
    blobs: int
    bytes: int


def find_garbage(snapshot: ReadSnapshot, before: int) -> Purged:
    """Count what `purge` would delete now. Blobs that only those runs name are not counted.

    Args:
        snapshot: View of the database.
        before: Milliseconds since 1970. Things that were deleted later are kept.
    """
    count = "SELECT count(*) FROM"
    runs = _ask(snapshot, f"{count} run WHERE {_OLD_RUNS}", before)[0][0]
    models = _ask(
        snapshot,
        f"{count} logged_model WHERE ({_OLD_MODELS}) OR EXISTS (SELECT 1 FROM run WHERE"
        f" run.project = logged_model.project AND run.id = logged_model.run_id AND {_OLD_RUNS} AND NOT {_NAMES_MODEL})"
        f" OR experiment IN (SELECT id FROM experiment WHERE {_OLD_EXPERIMENTS})",
        before,
    )[0][0]
    experiments = _ask(snapshot, f"{count} experiment WHERE {_OLD_EXPERIMENTS}", before)[0][0]
    projects = len(_old_projects(snapshot, before))
    blobs = _unnamed_blobs(snapshot, before)
    size = sum(size for _, _, size in blobs)
    return Purged(
        runs=runs, logged_models=models, experiments=experiments, projects=projects, blobs=len(blobs), bytes=size
    )


def purge(database: Database, blobs: Blobs, before: int) -> Purged:
    """Delete runs, models, experiments and projects that were deleted before a moment, and bytes that nothing names.

    Runs and logged models that a version in the registry was made from stay, until the version is deleted too.
    A project goes with all that it held.

    Servers on PostgreSQL may run at the same time. With SQLite, `Database` has refused already where one runs.

    Args:
        database: An open database.
        blobs: Bytes of artifacts.
        before: Milliseconds since 1970. Blobs that are younger are kept too: a client may be about to name them.
    """
    projects = database.read_and_wait(_old_projects, before)
    for project, _ in projects:  # first: a version keeps the run that it was made from, and a job its bytes
        database.write_and_wait(_execute_each, (*_REGISTRY_OF_PROJECT, *_JOBS_OF_PROJECT), project)
    runs = models = 0
    while (deleted := database.write_and_wait(_purge_runs, before))[0]:
        runs, models = runs + deleted[0], models + deleted[1]
    while count := database.write_and_wait(_purge_models_in_bin, before):
        models += count
    experiments, of_experiments = database.write_and_wait(_purge_experiments, before)
    models += of_experiments
    count = size = 0
    for project, sha256, length in database.read_and_wait(_unnamed_blobs, before):
        if database.write_and_wait(_forget_blob, blobs, project, sha256, before):
            count, size = count + 1, size + length
    database.write_and_wait(quotas.recount)
    for project, name in projects:
        database.write_and_wait(_purge_project, project, name)
    return Purged(
        runs=runs, logged_models=models, experiments=experiments, projects=len(projects), blobs=count, bytes=size
    )


def _ask(snapshot: ReadSnapshot, sql: str, before: int) -> list[Any]:
    """Return the rows of a query in which each parameter is `before`."""
    return list(snapshot.execute(sql, (before,) * sql.count("?")).fetchall())


def _old_projects(snapshot: ReadSnapshot, before: int) -> list[tuple[int, str]]:
    return list(snapshot.execute("SELECT id, name FROM project WHERE deleted_at < ?", (before,)).fetchall())


def _execute_each(tx: Transaction, statements: Sequence[str], project: int) -> None:
    for sql in statements:
        tx.execute(sql, (project,))


def _purge_project(tx: Transaction, project: int, name: str) -> None:
    """Delete what is left of a project: its pools, members, tokens and names."""
    _record(tx, project, "project.purge", name)
    _execute_each(tx, _REST_OF_PROJECT, project)


def _purge_runs(tx: Transaction, before: int) -> tuple[int, int]:
    """Delete some runs, and the logged models that they made. Returns the number of both."""
    sql = f"SELECT pk, id, project FROM run WHERE {_OLD_RUNS} ORDER BY deleted_at LIMIT {_RUNS}{tx.for_update}"
    rows = _ask(tx, sql, before)
    tables = [
        table.name
        for table in metadata.sorted_tables
        if "run" in table.c and isinstance(table.c.run.type, type(INTEGER))
    ]
    models = 0
    for pk, run_id, project in rows:
        models += _purge_models(tx, f"project = ? AND run_id = ? AND NOT {_NAMES_MODEL}", (project, run_id))
        for name in tables:
            tx.execute(f"DELETE FROM {name} WHERE run = ?", (pk,))
        tx.execute("DELETE FROM token WHERE project = ? AND run = ?", (project, run_id))
        tx.execute("DELETE FROM run WHERE pk = ?", (pk,))
        _record(tx, project, "run.purge", f"run/{run_id}")
    return len(rows), models


def _purge_models_in_bin(tx: Transaction, before: int) -> int:
    condition = f"pk IN (SELECT pk FROM logged_model WHERE {_OLD_MODELS} LIMIT {_MODELS})"
    return _purge_models(tx, condition, (before,) * condition.count("?"))


def _purge_models(tx: Transaction, condition: str, values: tuple[object, ...]) -> int:
    rows = tx.execute(
        f"SELECT pk, id, project FROM logged_model WHERE {condition} ORDER BY pk{tx.for_update}", values
    ).fetchall()
    for pk, model_id, project in rows:
        for name in ("logged_model_attribute", "logged_model_metric"):
            tx.execute(f"DELETE FROM {name} WHERE model = ?", (pk,))
        tx.execute("DELETE FROM artifact WHERE run = ?", (-pk,))
        tx.execute("DELETE FROM logged_model WHERE pk = ?", (pk,))
        _record(tx, project, "logged_model.purge", f"logged_model/{model_id}")
    return len(rows)


def _purge_experiments(tx: Transaction, before: int) -> tuple[int, int]:
    """Delete experiments and the logged models that no run of them made. Returns the number of both."""
    rows = _ask(tx, f"SELECT id, project FROM experiment WHERE {_OLD_EXPERIMENTS}", before)
    rows = [row for row in rows if tx.execute("SELECT 1 FROM run WHERE experiment = ?", (row[0],)).fetchone() is None]
    models = 0
    for number, project in rows:
        models += _purge_models(tx, "experiment = ?", (number,))
        tx.execute("DELETE FROM experiment_tag WHERE experiment = ?", (number,))
        tx.execute("DELETE FROM experiment WHERE id = ?", (number,))
        _record(tx, project, "experiment.purge", f"experiment/{number}")
    return len(rows), models


def _record(tx: Transaction, project: int, action: str, resource: str) -> None:
    organization = tx.execute("SELECT organization FROM project WHERE id = ?", (project,)).fetchone()[0]
    journal.add_audit(tx, organization, project, _ACTOR, None, action, resource, {})


def _named() -> str:
    """Return the SQL condition that some table names a blob. Each table with a `sha256` counts."""
    tables = [
        table.name for table in metadata.sorted_tables if "sha256" in table.c and table.name not in ("blob", "token")
    ]
    return " OR ".join(f"EXISTS (SELECT 1 FROM {name} WHERE {name}.sha256 = blob.sha256)" for name in tables)


def _unnamed_blobs(snapshot: ReadSnapshot, before: int) -> list[tuple[int, str, int]]:
    rows = snapshot.execute(
        f"SELECT project, sha256, size FROM blob WHERE created_at < ? AND NOT ({_named()})", (before,)
    )
    return [tuple(row) for row in rows.fetchall()]


def _forget_blob(tx: Transaction, blobs: Blobs, project: int, sha256: str, before: int) -> bool:
    """Delete a blob that is still unnamed, and its bytes once the commit is durable and no project has them."""
    deleted = tx.execute(
        f"DELETE FROM blob WHERE project = ? AND sha256 = ? AND created_at < ? AND NOT ({_named()})",
        (project, sha256, before),
    ).rowcount
    if deleted and tx.execute("SELECT 1 FROM blob WHERE sha256 = ?", (sha256,)).fetchone() is None:
        tx.after_commit(lambda: blobs.delete(sha256))
    return bool(deleted)
