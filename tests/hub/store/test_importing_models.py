"""Import of MLflow's registered and logged models: complete, repeatable, and with versions that lead to the bytes."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from pathlib import Path

import pytest

from skyward.hub.model.foreign import ForeignRuns
from skyward.hub.model.registry import ModelStatus, Stage
from skyward.hub.model.runs import Lifecycle
from skyward.hub.services.hub import Hub
from skyward.hub.store import logged_models, registry
from skyward.hub.store.check import check_hub
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.importing import import_runs
from skyward.hub.store.mlflow_database import MlflowDatabase
from skyward.hub.store.transaction import ReadSnapshot
from tests.hub.services.hubs import ADMIN
from tests.hub.store.sources import NAMES, mlflow_database, open_source


@pytest.fixture(params=NAMES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ForeignRuns:
    return open_source(request.param, tmp_path)


def test_registered_models_come_with_versions_that_lead_to_imported_bytes(
    source: ForeignRuns, database: Database, tmp_path: Path
) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    outcome = import_runs(source, database, blobs, ADMIN)
    assert outcome.problems == []
    assert outcome.is_complete
    kinds = ("registered_models", "model_versions", "aliases")
    assert [outcome.source[kind] for kind in kinds] == [2, 6, 1]
    assert import_runs(source, database, blobs, ADMIN) == outcome
    hub = Hub(database, blobs)

    async def look() -> None:
        model = await hub.registry.model(ADMIN, "digits")
        assert (model.description, model.tags, model.aliases) == ("Reads digits.", {"task": "vision"}, {"champion": 2})
        first, second, third, fourth, fifth = [await hub.registry.version(ADMIN, "digits", n) for n in range(1, 6)]
        assert (first.description, first.tags, first.stage) == ("The first.", {"best": "yes"}, Stage.NONE)
        assert (second.stage, second.aliases) == (Stage.PRODUCTION, ("champion",))
        assert second.source == second.location == third.source == f"runs:/{second.run_id}/model"
        assert (fourth.source, fourth.location) == ("s3://weights/of/digits", "s3://weights/of/digits")
        assert fourth.run_link == "https://elsewhere.example/run"
        assert (fifth.source, fifth.location) == ("models:/digits/2", second.location)
        assert first.created_at < second.created_at
        _, pieces = await hub.tracking.open_artifact(ADMIN, second.run_id or "", "model/weights")
        assert b"".join(pieces) == b"1"
        made = await hub.registry.create_version(ADMIN, "digits", "s3://weights/new")
        assert made.version == 7  # 6 was deleted in MLflow, and no number is used twice
        assert [version.version for version in (await hub.registry.search_versions(ADMIN, model="greeting")).items]

    asyncio.run(look())


@pytest.mark.parametrize("name", ["3.17.2", "mlruns-3"])
def test_logged_models_come_with_metrics_files_and_links(name: str, database: Database, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    outcome = import_runs(open_source(name, tmp_path), database, blobs, ADMIN)
    assert (outcome.source["logged_models"], outcome.source["model_links"]) == (2, 2)
    hub = Hub(database, blobs)

    async def look() -> None:
        experiment = await hub.tracking.experiment_named(ADMIN, "digits")
        (model,) = (await hub.registry.search_logged_models(ADMIN, [experiment.id])).items
        assert (model.name, model.kind, model.status) == ("net", "net", ModelStatus.READY)
        assert (model.params, model.tags["size"]) == ({"depth": "3"}, "small")
        accuracy, recall = model.metrics
        assert (accuracy.value, accuracy.step, accuracy.run_id) == (0.9, 3, model.run_id)
        assert (accuracy.dataset_name, accuracy.dataset_digest) == ("digits", "0a1b2c")
        assert math.isnan(recall.value) or name == "3.17.2"  # MLflow's database kept 0 in its place
        _, pieces = await hub.tracking.open_artifact(ADMIN, f"models/{model.id}", "weights")
        assert b"".join(pieces) == b"logged"
        maker = await hub.tracking.run(ADMIN, model.run_id or "")
        assert [(link.model_id, link.direction, link.step) for link in maker.models] == [(model.id, "output", 3)]
        version = await hub.registry.version(ADMIN, "digits", 1)
        assert (version.source, version.location) == (f"models:/{model.id}", model.artifact_uri)
        assert (version.run_id, version.location.split("/")[1]) == (model.run_id, experiment.id)

    asyncio.run(look())
    deleted = database.read_and_wait(_ids_of_deleted_models)
    assert len(deleted) == 1
    assert list(database.read_and_wait(lambda snapshot: list(check_hub(snapshot, blobs)))) == []


def _ids_of_deleted_models(snapshot: ReadSnapshot) -> list[str]:
    rows = snapshot.execute("SELECT id FROM logged_model WHERE lifecycle = 'deleted'").fetchall()
    found = [logged_models.find_logged_model(snapshot, 1, row[0]) for row in rows]
    assert all(model is not None and model.lifecycle is Lifecycle.DELETED for model in found)
    return [row[0] for row in rows]


def changed(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_changes_in_the_source_follow_and_those_in_the_hub_stay(database: Database, tmp_path: Path) -> None:
    url, blobs = mlflow_database("3.17.2", tmp_path), FolderBlobs(tmp_path / "blobs")
    changed(
        tmp_path / "3.17.2.db",
        "UPDATE runs SET status = 'RUNNING', end_time = NULL",
        "UPDATE logged_models SET status = 1",
    )
    assert import_runs(MlflowDatabase(url), database, blobs, ADMIN).is_complete
    changed(
        tmp_path / "3.17.2.db",
        "UPDATE runs SET status = 'FINISHED', end_time = 1700000060000",
        "INSERT INTO tags (key, value, run_uuid) SELECT 'late', 'yes', run_uuid FROM runs",
        "INSERT INTO params (key, value, run_uuid) SELECT 'late', '1', run_uuid FROM runs",
        "UPDATE logged_models SET status = 2 WHERE name = 'net'",
        "INSERT INTO registered_model_aliases (name, alias, version) VALUES ('digits', 'next', 3)",
        "INSERT INTO model_version_tags (name, version, key, value) VALUES ('digits', 1, 'late', 'yes')",
    )
    hub = Hub(database, blobs)
    asyncio.run(hub.registry.move_version(ADMIN, "digits", 2, Stage.ARCHIVED))
    asyncio.run(hub.registry.set_alias(ADMIN, "digits", "champion", 4))
    asyncio.run(hub.registry.delete_version(ADMIN, "digits", 3))
    outcome = import_runs(MlflowDatabase(url), database, blobs, ADMIN)
    assert outcome.problems == [
        "model digits, version 2: its stage is Archived in the hub, which stays, and Production there",
        "model digits, version 3: it was deleted in the hub, and stays deleted",
        "model digits: its alias 'champion' names version 4 in the hub, which stays, and 2 there",
    ]
    assert not outcome.is_complete

    async def look() -> None:
        model = await hub.registry.model(ADMIN, "digits")
        assert model.aliases == {"champion": 4, "next": 3}
        assert (await hub.registry.version(ADMIN, "digits", 1)).tags == {"best": "yes", "late": "yes"}
        version = await hub.registry.version(ADMIN, "digits", 2)
        run = await hub.tracking.run(ADMIN, version.run_id or "")
        assert (run.state.value, run.ended_at) == ("completed", 1_700_000_060_000)
        assert (run.params["late"], run.tags["late"]) == ("1", "yes")
        (logged,) = (await hub.registry.search_logged_models(ADMIN, [run.experiment_id])).items
        assert logged.status is ModelStatus.READY

    asyncio.run(look())


def test_version_whose_bytes_are_elsewhere_is_named_and_comes_later(database: Database, tmp_path: Path) -> None:
    url, blobs = mlflow_database("2.22.0", tmp_path), FolderBlobs(tmp_path / "blobs")
    root = tmp_path / "artifacts-2.22.0"
    changed(
        tmp_path / "2.22.0.db",
        f"UPDATE runs SET artifact_uri = replace(artifact_uri, '{root}', 'mlflow-artifacts:')",
        f"UPDATE model_versions SET source = replace(source, '{root}', 'mlflow-artifacts:'),"
        f" storage_location = replace(storage_location, '{root}', 'mlflow-artifacts://host:5000')",
    )
    outcome = import_runs(MlflowDatabase(url), database, blobs, ADMIN)
    assert next(problem for problem in outcome.problems if "version 1:" in problem).endswith(
        "is not among the imported artifacts; log the model to a run, and register it again"
    )
    outcome = import_runs(MlflowDatabase(url, root), database, blobs, ADMIN)
    assert outcome.problems == []
    assert outcome.is_complete
    version = asyncio.run(Hub(database, blobs).registry.version(ADMIN, "digits", 1))
    assert version.source == version.location == f"runs:/{version.run_id}/model"
    changed(tmp_path / "2.22.0.db", "UPDATE model_versions SET creation_time = 1 WHERE name = 'digits' AND version = 4")
    outcome = import_runs(MlflowDatabase(url, root), database, blobs, ADMIN)
    assert outcome.problems == [
        "model digits, version 4: the hub has another version of this number, which stays",
    ]


def test_illegal_names_and_missing_runs_are_problems_not_failures(database: Database, tmp_path: Path) -> None:
    url, blobs = mlflow_database("3.17.2", tmp_path), FolderBlobs(tmp_path / "blobs")
    changed(
        tmp_path / "3.17.2.db",
        "UPDATE logged_models SET model_id = '../evil' WHERE name = 'unused'",
        "UPDATE registered_models SET name = 'a/b' WHERE name = 'greeting'",
        "UPDATE registered_model_aliases SET alias = 'v1'",
        "UPDATE model_versions SET source = 'runs:/0123/model', run_id = NULL WHERE version = 3",
        "UPDATE model_versions SET source = '/etc', storage_location = '/etc' WHERE version = 4",
    )
    outcome = import_runs(MlflowDatabase(url), database, blobs, ADMIN)
    assert [problem.partition(":")[0] for problem in outcome.problems] == [
        "logged model ../evil",
        "model a/b",
        "model digits, version 3",
        "model digits, version 4",
        "model digits",
    ]
    number = database.read_and_wait(registry.find_model, 1, "digits")
    assert number is not None
    assert database.read_and_wait(registry.made_at, number.id, 3) is None
