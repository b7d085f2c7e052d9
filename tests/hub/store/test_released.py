"""Hubs of every release open forever: their data are read, found whole, and written on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.hub.model.access import Actor, Role
from skyward.hub.model.jobs import JobState
from skyward.hub.model.registry import ModelStatus, Stage
from skyward.hub.model.runs import Lifecycle
from skyward.hub.services.hub import Hub
from skyward.hub.store.check import check_hub
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.registry_tables import metadata
from skyward.hub.store.schema import HEAD, REVISIONS
from skyward.hub.store.snapshots import snapshot_of
from tests.hub.services.hubs import columns
from tests.hub.store.released import released_revisions, unpack_hub

START = 1_700_000_000_000


@pytest.fixture(params=released_revisions())
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack_hub(request.param, tmp_path)


@pytest.fixture
def hub(data: Path) -> Iterator[Hub]:
    hub = Hub(Database(f"sqlite:///{data}/hub.db"), FolderBlobs(data / "blobs"))
    yield hub
    asyncio.run(hub.close())


def test_each_revision_has_an_asset_with_rows_in_each_table(tmp_path: Path) -> None:
    assert tuple(released_revisions()) == REVISIONS
    with snapshot_of(f"sqlite:///{unpack_hub(HEAD, tmp_path)}/hub.db") as snapshot:
        empty = [
            table for table in metadata.tables if snapshot.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0] == 0
        ]
    assert empty == []  # make the asset again, with tests/hub/assets/make_hub.py


def owner_of(hub: Hub, data: Path) -> Actor:
    return asyncio.run(hub.access.actor_for((data / "token").read_text(), None))


def test_sweeps_of_a_release_are_read_back(hub: Hub, data: Path) -> None:
    owner = owner_of(hub, data)

    async def look() -> None:
        for sweep in await hub.sweeps.sweeps(owner, 0, 10):  # releases before 0004 have none
            changes = await hub.sweeps.changes(owner, sweep.id, 0)
            assert [(trial.state.value, trial.values, trial.params["x"].value) for trial in changes.trials] == [
                ("completed", [math.inf], 0.5)
            ]
            assert [step.step for step in changes.steps] == [0, 1]

    asyncio.run(look())


def test_runs_of_a_release_are_read_back(hub: Hub, data: Path) -> None:
    owner = owner_of(hub, data)

    async def look() -> None:
        experiment = await hub.tracking.experiment_named(owner, "digits")
        assert (experiment.tags, experiment.owner) == ({"team": "vision"}, "owner")
        assert (await hub.tracking.experiment_named(owner, "gone")).lifecycle is Lifecycle.DELETED
        page = await hub.tracking.search_runs(owner, [experiment.id])
        names = {run.id: (run.state.value, run.name) for run in page.items}
        states = ("queued", "running", "completed", "failed", "cancelled", "lost")
        assert names == {state: (state, f"the {state} one") for state in states}
        assert (await hub.tracking.run(owner, "deleted")).lifecycle is Lifecycle.DELETED
        run = await hub.tracking.run(owner, "running")
        assert (run.params, run.tags["kind"]) == ({"lr": "0.1", "depth": "3"}, "small")
        assert {metric.key: metric.step for metric in run.metrics} == {"loss": 1009, "odd": 4}
        (dataset,) = run.inputs
        assert (dataset.name, dataset.schema, dataset.tags) == ("digits", "[]", {"mlflow.data.context": "training"})
        loss = await hub.tracking.history(owner, "running", "loss")
        assert list(loss.values) == [1.0 / (step + 1) for step in range(1010)]
        assert list(loss.timestamps) == [START + step for step in range(1010)]
        odd = list((await hub.tracking.history(owner, "running", "odd")).values)
        assert [math.isnan(value) for value in odd] == [True, False, False, False, True]
        assert (odd[1] > 1e308, odd[2] < -1e308, odd[3]) == (True, True, 2.5)
        _, pieces = await hub.tracking.open_artifact(owner, "running", "model/copy")
        assert b"".join(pieces) == b"weights"
        assert [command.action for command in await hub.tracking.commands(owner, "running")] == ["save"]

    asyncio.run(look())


def test_models_pools_and_people_of_a_release_are_read_back(hub: Hub, data: Path) -> None:
    owner = owner_of(hub, data)

    async def look() -> None:
        model = await hub.registry.model(owner, "digits")
        assert (model.description, model.tags, model.aliases) == ("Reads digits.", {"task": "vision"}, {"champion": 2})
        versions = (await hub.registry.search_versions(owner, model="digits")).items
        assert {version.version: version.stage for version in versions} == {1: Stage.NONE, 2: Stage.PRODUCTION}
        first = await hub.registry.version(owner, "digits", 1)
        assert (first.tags, first.description, first.run_id) == ({"best": "yes"}, "The first.", "running")
        second = await hub.registry.version(owner, "digits", 2)
        logged = await hub.registry.logged_model(owner, second.source.removeprefix("models:/"))
        assert (logged.status, logged.params, logged.tags["size"]) == (ModelStatus.READY, {"depth": "3"}, "small")
        assert (logged.metrics[0].value, math.isnan(logged.metrics[1].value)) == (0.9, True)
        _, pieces = await hub.tracking.open_artifact(owner, f"models/{logged.id}", "weights")
        assert b"".join(pieces) == b"logged"
        (pool,) = (await hub.pools.pools(owner, 10, None)).items
        assert (pool.name, pool.state, pool.calls) == ("training", "closed", 1)
        assert {user.name for user in await hub.people.users(owner)} == {"owner", "ada", "robot"}
        (member,) = await hub.people.members(owner, "vision")
        assert (member.user, member.role) == ("ada", Role.RESEARCHER)
        assert {token.kind for token in await hub.people.tokens(owner, everybody=True)} >= {"token", "run"}

    asyncio.run(look())


def test_jobs_of_a_release_are_read_back(hub: Hub, data: Path, request: pytest.FixtureRequest) -> None:
    owner = owner_of(hub, data)

    async def look() -> None:
        found = (await hub.jobs.jobs(owner, 10)).items
        if request.node.callspec.params["data"] < "0003":  # it had none
            assert not found
            return
        job = await hub.jobs.job(owner, found[-1].id)
        assert (job.name, job.state, job.user, job.cost_usd) == ("fit", JobState.COMPLETED, "owner", 0.75)
        assert (job.spec.nodes, job.spec.image, job.results) == (2, {"pip": ["numpy"]}, ["value"])
        (attempt,) = job.attempts
        assert (attempt.machines, list(attempt.nodes), attempt.end) == ("local", [0, 1], "completed")
        assert [piece.body async for piece in hub.jobs.follow(owner, job.id)] == [b"step 1\n"]
        _, content = await hub.jobs.open_blob(owner, job.id, "value")
        assert b"".join(content) == b"value"

    asyncio.run(look())


def test_hub_of_a_release_is_whole_and_goes_on(hub: Hub, data: Path) -> None:
    owner, blobs = owner_of(hub, data), FolderBlobs(data / "blobs")
    assert hub.database.read_and_wait(lambda snapshot: list(check_hub(snapshot, blobs))) == []

    async def go_on() -> None:
        await hub.tracking.create_run(owner, "0", run_id="new")
        await hub.tracking.log_points(owner, "running", columns(("loss", 1010, START + 1010, 0.0)))
        assert (await hub.registry.create_version(owner, "digits", "s3://weights/new")).version == 4
        assert len(await hub.tracking.history(owner, "running", "loss")) == 1011

    asyncio.run(go_on())
    row = hub.database.read_and_wait(
        lambda snapshot: snapshot.execute("SELECT pk FROM run WHERE id = 'running'").fetchone()
    )
    assert hub.database.sealer.seal(row[0], merges=True)
    assert hub.database.read_and_wait(lambda snapshot: list(check_hub(snapshot, blobs))) == []
