"""Import of another server's runs. It can be repeated: nothing is added twice, and the rest of a broken one follows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..model.access import Actor
from ..model.foreign import ForeignExperiment, ForeignRun, ForeignRuns
from ..model.names import PARAM_LENGTH, TAG_LENGTH, check_artifact_key, check_run_id, cut_values
from ..model.points import PointColumns
from ..model.refusal import Refusal
from ..model.runs import Artifact, Lifecycle, Run
from . import artifacts, experiments, journal, points, runs
from .blobs import PIECE, Blobs, put_blob
from .database import Database
from .transaction import ReadSnapshot, Transaction

KINDS = ("experiments", "runs", "params", "tags", "points", "artifacts")
_POINTS = 50_000
"""Points of one transaction, so that memory stays small."""


@dataclass(slots=True)
class Imported:
    """Outcome of an import.

    Attributes:
        source: Number of things in the source, by kind.
        hub: Number of the same things in the hub afterwards.
        problems: Things that could not be imported, in words.
    """

    source: Counter[str] = field(default_factory=Counter)
    hub: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.source == self.hub and not self.problems


def import_runs(source: ForeignRuns, database: Database, blobs: Blobs, actor: Actor) -> Imported:
    """Copy experiments, runs, points and local artifacts into the actor's project.

    Args:
        source: Runs of another server. It is read only.
        database: An open database of the hub.
        blobs: Where bytes of artifacts are put.
        actor: Identity in the audit, and the project.

    Raises:
        UsageError: The source is damaged.
    """
    outcome = Imported()
    for experiment in source.experiments():
        outcome.source["experiments"] += 1
        number = database.write_and_wait(_add_experiment, actor, experiment)
        outcome.hub["experiments"] += 1
        for run in source.runs(experiment.id):
            outcome.source.update(runs=1, params=len(run.params), tags=len(run.tags))
            try:
                _import_run(source, database, blobs, actor, number, run, outcome)
            except Refusal as refusal:
                outcome.problems.append(f"run {run.id}: {refusal.message}")
        if experiment.lifecycle is Lifecycle.DELETED:
            database.write_and_wait(_bin_experiment, actor, number)
    return outcome


def _import_run(
    source: ForeignRuns,
    database: Database,
    blobs: Blobs,
    actor: Actor,
    experiment: int,
    run: ForeignRun,
    outcome: Imported,
) -> None:
    columns = source.points(run.id)
    outcome.source["points"] += len(columns)
    pk = database.write_and_wait(_add_run, actor, experiment, run)
    if database.read_and_wait(_count_points, pk) < len(columns):  # equal points count once, so all come again
        for part in _parts(columns):
            database.write_and_wait(points.append, actor.project, pk, part)
    for key, path in _files(run, outcome):
        outcome.source["artifacts"] += 1
        _import_artifact(database, blobs, actor, pk, key, path)
    database.read_and_wait(_count, actor, run, pk, outcome)


def _add_experiment(tx: Transaction, actor: Actor, experiment: ForeignExperiment) -> int:
    known = experiments.find_experiment_named(tx, actor.project, experiment.name)
    if known is not None:
        return int(known.id)
    number = experiments.add_experiment(tx, actor.project, experiment.name, actor.user, None, dict(experiment.tags))
    assert number is not None
    _record(tx, actor, "experiment.import", f"experiment/{number}")
    return number


def _bin_experiment(tx: Transaction, actor: Actor, number: int) -> None:
    known = experiments.find_experiment(tx, actor.project, number)
    if known is not None and known.lifecycle is Lifecycle.ACTIVE:
        experiments.set_experiment_lifecycle(tx, number, Lifecycle.DELETED)


def _add_run(tx: Transaction, actor: Actor, experiment: int, run: ForeignRun) -> int:
    check_run_id(run.id)
    known = runs.find_run(tx, actor.project, run.id)
    if known is not None:
        return known.pk
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
            params=cut_values("params", run.params, PARAM_LENGTH),
            tags=cut_values("tags", run.tags, TAG_LENGTH),
        ),
    )
    assert pk is not None
    if run.lifecycle is Lifecycle.DELETED:
        runs.set_run_lifecycle(tx, pk, Lifecycle.DELETED)
    _record(tx, actor, "run.import", f"run/{run.id}")
    return pk


def _record(tx: Transaction, actor: Actor, action: str, resource: str) -> None:
    journal.add_audit(tx, actor.organization, actor.project, actor.user, actor.token, action, resource, {})


def _parts(columns: PointColumns) -> Iterator[PointColumns]:
    for start in range(0, len(columns), _POINTS):
        part = slice(start, start + _POINTS)
        yield PointColumns(columns.keys[part], columns.steps[part], columns.timestamps[part], columns.values[part])


def _files(run: ForeignRun, outcome: Imported) -> Iterator[tuple[str, Path]]:
    """Yield keys and files of a run. Links are left out: they may lead out of the folder."""
    if run.artifacts is None:
        outcome.problems.append(f"run {run.id}: its artifacts are not on this machine; pass --artifacts FOLDER")
        return
    for folder, _, names in os.walk(run.artifacts):
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(run.artifacts).as_posix(), path


def _import_artifact(database: Database, blobs: Blobs, actor: Actor, pk: int, key: str, path: Path) -> None:
    check_artifact_key(key)
    known = database.read_and_wait(artifacts.find_artifact, pk, key)
    if known is not None and known.size == path.stat().st_size:
        return
    with path.open("rb") as file:
        sha256, size = put_blob(blobs, iter(lambda: file.read(PIECE), b""))
    database.write_and_wait(_set_artifact, actor, pk, Artifact(key, size, sha256))


def _set_artifact(tx: Transaction, actor: Actor, pk: int, artifact: Artifact) -> None:
    artifacts.add_blob(tx, actor.project, artifact.sha256, artifact.size)
    artifacts.set_artifact(tx, pk, artifact)


def _count_points(snapshot: ReadSnapshot, pk: int) -> int:
    sql = "SELECT (SELECT coalesce(sum(points), 0) FROM {0} WHERE run = ?)"
    return sum(int(snapshot.execute(sql.format(name), (pk,)).fetchone()[0]) for name in ("tail", "chunk"))


def _count(snapshot: ReadSnapshot, actor: Actor, run: ForeignRun, pk: int, outcome: Imported) -> None:
    """Count what the hub has of a run's things, by looking them up."""
    stored = runs.load_run(snapshot, actor.project, run.id)
    assert stored is not None
    files = snapshot.execute("SELECT count(*) FROM artifact WHERE run = ?", (pk,)).fetchone()[0]
    outcome.hub.update(
        runs=1,
        params=sum(key in stored.params for key in run.params),
        tags=sum(key in stored.tags for key in run.tags),
        points=_count_points(snapshot, pk),
        artifacts=int(files),
    )
