"""Registered models, versions and logged models, as services hand them out, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from skyward.hub.model.refusal import Reason
from skyward.hub.model.registry import ModelMetric, ModelStatus, Stage
from skyward.hub.model.search import LOGGED_MODELS, MODEL_VERSIONS, REGISTERED_MODELS, parse_filter
from skyward.hub.services.registry import Registry
from skyward.hub.services.tracking import Tracking
from skyward.hub.store import logged_models, registry, registry_search
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.retention import purge
from skyward.hub.store.transaction import Transaction
from tests.hub.services.hubs import ADA, ADMIN, VIEWER, add_project
from tests.hub.services.test_tracking import refused
from tests.hub.store.test_plans import Recorder, scans


def test_a_model_is_registered_promoted_searched_and_deleted(database: Database) -> None:
    tracking, models = Tracking(database), Registry(database)

    async def run() -> None:
        for name in ("net", "other"):
            await models.create_model(ADA, name, {"team": "red"})
        for number in range(3):
            made = await tracking.create_run(ADA, "0")
            source = f"runs:/{made.id}/model"
            version = await models.create_version(ADA, "net", source, run_id=made.id, tags={"n": str(number)})
            assert (version.version, version.run_id, version.stage) == (number + 1, made.id, Stage.NONE)
        for number in (1, 3):
            await models.move_version(ADMIN, "net", number, Stage.PRODUCTION, archives_others=True)
        assert [v.stage for v in await models.latest_versions(VIEWER, "net")] == [
            Stage.ARCHIVED, Stage.NONE, Stage.PRODUCTION,
        ]  # fmt: skip
        await models.set_alias(ADA, "net", "champion", 3)
        assert (await models.version_by_alias(VIEWER, "net", "champion")).version == 3
        assert (await models.version_by_alias(VIEWER, "net", "Latest")).version == 3
        found = await models.search_versions(VIEWER, "name IN ('net') AND tags.n != '0' AND version_number < 3")
        assert [v.version for v in found.items] == [2]
        page = await models.search_models(VIEWER, "tags.team = 'red'", ["timestamp DESC"], 1)
        assert ([m.name for m in page.items], page.next_token is None) == (["net"], False)
        copied = await models.create_version(ADA, "other", "models:/net@latest")
        assert copied.source == "models:/net/3"
        await models.delete_version(ADA, "net", 3)
        assert (await models.model(VIEWER, "net")).aliases == {}
        await models.rename_model(ADA, "net", "net2")
        await models.delete_model(ADA, "net2")

    asyncio.run(run())
    refused(models.model(ADA, "net2"), Reason.MISSING, "Registered Model with name=net2 not found")
    refused(models.create_model(VIEWER, "x"), Reason.FORBIDDEN, "may not write")
    refused(models.move_version(ADA, "other", 1, Stage.STAGING), Reason.FORBIDDEN, "may not manage")
    foreign = replace(ADMIN, project=add_project(database, "foreign"))
    refused(models.model(foreign, "other"), Reason.MISSING, "not found")
    refused(models.delete_model(replace(ADA, user="bob"), "other"), Reason.FORBIDDEN, "may not delete")


def test_the_token_of_a_run_registers_its_own_artifacts_only(database: Database) -> None:
    tracking, models = Tracking(database), Registry(database)

    async def make() -> tuple[str, str]:
        await models.create_model(ADA, "net")
        return (await tracking.create_run(ADA, "0")).id, (await tracking.create_run(ADA, "0")).id

    own, other = asyncio.run(make())
    actor = replace(ADA, run=own)
    made = asyncio.run(models.create_version(actor, "net", f"runs:/{own}/m", run_id=own))
    assert made.version == 1
    refused(models.create_version(actor, "net", f"runs:/{other}/m", run_id=other), Reason.MISSING, "not found")
    refused(models.create_version(actor, "net", "s3://bucket/m"), Reason.FORBIDDEN, "is of one run")
    refused(models.set_alias(actor, "net", "a", 1), Reason.FORBIDDEN, "is of one run")


def test_a_logged_model_is_deleted_once_however_often_its_client_asks(database: Database) -> None:
    changes: list[str] = []
    models = Registry(database, on_change=lambda _tx, _actor, name, *_: changes.append(name))

    async def run() -> str:
        made = await models.create_logged_model(ADA, "0")
        for _ in range(2):
            await models.delete_logged_model(ADA, made.id)
        return made.id

    model_id = asyncio.run(run())
    assert changes == ["logged_model.create", "logged_model.delete"]
    refused(models.logged_model(ADA, model_id), Reason.MISSING, "not found")
    refused(models.delete_logged_model(ADA, "m-0"), Reason.MISSING, "not found")


def test_an_experiment_that_is_deleted_for_good_takes_its_logged_models_along(
    database: Database, tmp_path: Path
) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    tracking, models = Tracking(database, blobs), Registry(database)

    async def body() -> AsyncIterator[bytes]:
        yield b"weights"

    async def make() -> str:
        experiment = await tracking.create_experiment(ADA, "vision")
        model = await models.create_logged_model(ADA, experiment.id, params={"depth": "3"}, tags={"a": "b"})
        await tracking.put_artifact(ADA, f"models/{model.id}", "weights", body())
        await tracking.delete_experiment(ADA, experiment.id)
        return model.id

    model_id = asyncio.run(make())
    assert purge(database, blobs, database.clock() + 1_000).experiments == 1
    refused(models.logged_model(ADA, model_id), Reason.MISSING, "not found")
    assert list((tmp_path / "blobs").rglob("[0-9a-f]" * 64)) == []


def test_no_statement_of_the_registry_walks_over_a_table(database: Database) -> None:
    tracking, models = Tracking(database), Registry(database)

    async def fill() -> str:
        made = await tracking.create_run(ADA, "0")
        logged = await models.create_logged_model(ADA, "0", name="net", run_id=made.id, params={"depth": "3"})
        await models.finalize_logged_model(ADA, logged.id, ModelStatus.READY)
        metric = ModelMetric("acc", 0.5, 1, 1, made.id, logged.id)
        await models.log_model_metrics(ADA, [metric, metric])
        await models.create_model(ADA, "net", {"team": "red"})
        await models.create_version(ADA, "net", f"models:/{logged.id}", model_id=logged.id)
        return logged.id

    model_id = asyncio.run(fill())

    def operation(tx: Transaction) -> list[str]:
        recorder = Recorder(tx)
        model = registry.load_model(recorder, 1, "net")
        assert model is not None
        assert registry.find_version(recorder, model, 1) is not None
        registry.find_alias(recorder, model.id, "a")
        registry.archive_others(recorder, model.id, 1, Stage.STAGING)
        registry.change_version_tags(recorder, model.id, 1, {"a": "b"}, ["c"])
        found = logged_models.find_logged_model(recorder, 1, model_id)
        assert found is not None
        assert len(found.metrics) == 1
        for text in ("", "tags.team = 'red' AND name LIKE 'n%'"):
            registry_search.search_models(recorder, 1, parse_filter(text, REGISTERED_MODELS), (), 5, 0)
        for text in ("", "name = 'net'", "run_id = 'x'"):
            registry_search.search_versions(recorder, 1, parse_filter(text, MODEL_VERSIONS), (), 5, 0)
        text = "metrics.acc > 0.1 AND params.depth = '3'"
        logged_models.search_logged_models(recorder, 1, [0], parse_filter(text, LOGGED_MODELS), (), (), 5, 0)
        assert len(recorder.plans) > 15
        return [plan for plan in scans(recorder) if "latest" not in plan.partition("\n")[0]]

    assert database.write_and_wait(operation) == []
