"""Import of another server's runs. It can be repeated: nothing is added twice, and the rest of a broken one follows.

A thing that people have changed in the hub stays as it is there. The outcome names each difference.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..model.access import Actor
from ..model.foreign import ForeignExperiment, ForeignRun, ForeignRuns, Imported
from ..model.names import PARAM_LENGTH, TAG_LENGTH, check_run_id, cut_values
from ..model.points import PointColumns
from ..model.refusal import Refusal
from ..model.runs import Lifecycle, Run
from . import experiments, points, runs
from .blobs import Blobs
from .database import Database
from .history import read_history
from .importing_files import import_files, record_import
from .importing_models import ModelImport
from .transaction import ReadSnapshot, Transaction

KINDS = (
    "experiments", "runs", "params", "tags", "points", "datasets", "model_links", "artifacts",
    "logged_models", "registered_models", "model_versions", "aliases",
)  # fmt: skip
_POINTS = 50_000
"""Points of one transaction, so that memory stays small."""


def import_runs(source: ForeignRuns, database: Database, blobs: Blobs, actor: Actor) -> Imported:
    """Copy experiments, runs, points, models and the artifacts within reach into the actor's project.

    Args:
        source: Runs of another server. It is read only.
        database: An open database of the hub.
        blobs: Where bytes of artifacts are put.
        actor: Identity in the audit, and the project.

    Raises:
        UsageError: The source is damaged, or artifacts need a package that is missing.
    """
    outcome = Imported()
    models = ModelImport(database, blobs, actor, outcome)
    for experiment in source.experiments():
        outcome.source["experiments"] += 1
        number = database.write_and_wait(_add_experiment, actor, experiment)
        outcome.hub["experiments"] += 1
        for run in source.runs(experiment.id):
            outcome.source.update(_counts(run))
            try:
                if _import_run(source, database, blobs, actor, number, run, outcome):
                    models.note_run(run)
            except Refusal as refusal:
                outcome.problems.append(f"run {run.id}: {refusal.message}")
        for logged in source.logged_models(experiment.id):
            models.import_logged_model(logged, number)
        if experiment.lifecycle is Lifecycle.DELETED:
            database.write_and_wait(_bin_experiment, actor, number)
    for registered in source.registered_models():
        models.import_registered_model(registered)
    return outcome


def _counts(run: ForeignRun) -> dict[str, int]:
    return {
        "runs": 1,
        "params": len(run.params),
        "tags": len(run.tags),
        "datasets": len({(item.name, item.digest) for item in run.inputs}),
        "model_links": len({(link.direction, link.model_id) for link in run.models}),
    }


def _import_run(
    source: ForeignRuns,
    database: Database,
    blobs: Blobs,
    actor: Actor,
    experiment: int,
    run: ForeignRun,
    outcome: Imported,
) -> bool:
    """Copy a run with all that belongs to it. Returns whether its artifacts came along."""
    columns = source.points(run.id)
    outcome.source["points"] += len(columns)
    pk = database.write_and_wait(_put_run, actor, experiment, run)
    if database.read_and_wait(_count_points, actor.project, pk) < len(columns):  # equal ones count once: all come again
        for part in _parts(columns):
            database.write_and_wait(points.append, actor.project, pk, part)
        database.sealer.seal(pk, merges=True)
    has_files = import_files(run.files, f"run {run.id}", database, blobs, actor, pk, outcome)
    database.read_and_wait(_count, actor, run, pk, outcome)
    return has_files


def _add_experiment(tx: Transaction, actor: Actor, experiment: ForeignExperiment) -> int:
    known = experiments.find_experiment_named(tx, actor.project, experiment.name)
    if known is not None:
        return int(known.id)
    number = experiments.add_experiment(tx, actor.project, experiment.name, actor.user, None, dict(experiment.tags))
    assert number is not None
    record_import(tx, actor, f"experiment/{number}")
    return number


def _bin_experiment(tx: Transaction, actor: Actor, number: int) -> None:
    known = experiments.find_experiment(tx, actor.project, number)
    if known is not None and known.lifecycle is Lifecycle.ACTIVE:
        experiments.set_experiment_lifecycle(tx, number, Lifecycle.DELETED)


def _put_run(tx: Transaction, actor: Actor, experiment: int, run: ForeignRun) -> int:
    check_run_id(run.id)
    params = cut_values("params", run.params, PARAM_LENGTH)
    tags = cut_values("tags", run.tags, TAG_LENGTH)
    known = runs.load_run(tx, actor.project, run.id)
    row = runs.find_run(tx, actor.project, run.id)
    if known is None or row is None:
        pk = _add_run(tx, actor, experiment, run, params, tags)
    else:
        pk = row.pk
        if run.state.is_final and not known.state.is_final:  # it ended after an earlier import
            runs.change_run(tx, pk, state=run.state.value, ended_at=run.ended_at)
        runs.add_params(tx, actor.project, pk, {key: params[key] for key in params.keys() - known.params.keys()})
        runs.change_tags(tx, actor.project, pk, {key: tags[key] for key in tags.keys() - known.tags.keys()})
    runs.add_inputs(tx, pk, run.inputs, run.models)
    return pk


def _add_run(
    tx: Transaction, actor: Actor, experiment: int, run: ForeignRun, params: dict[str, str], tags: dict[str, str]
) -> int:
    pk = runs.add_run(
        tx,
        actor.project,
        Run(
            id=run.id,
            experiment_id=str(experiment),
            name=run.name,
            state=run.state,
            lifecycle=run.lifecycle,
            user=run.user or actor.user,
            started_at=run.started_at,
            ended_at=run.ended_at,
            artifact_uri="",
            params=params,
            tags=tags,
        ),
    )
    assert pk is not None
    if run.lifecycle is Lifecycle.DELETED:
        runs.set_run_lifecycle(tx, pk, Lifecycle.DELETED)
    record_import(tx, actor, f"run/{run.id}")
    return pk


def _parts(columns: PointColumns) -> Iterator[PointColumns]:
    for start in range(0, len(columns), _POINTS):
        part = slice(start, start + _POINTS)
        yield PointColumns(columns.keys[part], columns.steps[part], columns.timestamps[part], columns.values[part])


def _count_points(snapshot: ReadSnapshot, project: int, pk: int) -> int:
    """Count distinct points: an import that broke off may have left some twice."""
    names = snapshot.execute("SELECT key.name FROM latest JOIN key ON key.id = latest.key WHERE run = ?", (pk,))
    return sum(len(read_history(snapshot, project, pk, name)[0]) for (name,) in names.fetchall())


def _count(snapshot: ReadSnapshot, actor: Actor, run: ForeignRun, pk: int, outcome: Imported) -> None:
    """Count what the hub has of a run's things, by looking them up."""
    stored = runs.load_run(snapshot, actor.project, run.id)
    assert stored is not None
    inputs = {(item.name, item.digest) for item in stored.inputs}
    links = {(link.direction, link.model_id) for link in stored.models}
    outcome.hub.update(
        runs=1,
        params=sum(key in stored.params for key in run.params),
        tags=sum(key in stored.tags for key in run.tags),
        points=_count_points(snapshot, actor.project, pk),
        datasets=len(inputs & {(item.name, item.digest) for item in run.inputs}),
        model_links=len(links & {(link.direction, link.model_id) for link in run.models}),
    )
