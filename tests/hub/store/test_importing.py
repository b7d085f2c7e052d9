"""Import of MLflow's runs: databases of both versions and an mlruns folder, as MLflow itself wrote them."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from skyward.cli import main
from skyward.errors import UsageError
from skyward.hub.model.foreign import ForeignLoggedModel, ForeignRuns, Imported, local_folder
from skyward.hub.model.points import PointColumns
from skyward.hub.services.hub import Hub
from skyward.hub.store.check import check_hub
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.importing import import_runs
from skyward.hub.store.mlflow_database import MlflowDatabase
from skyward.hub.store.mlflow_folder import MlflowFolder
from skyward.hub.store.mlflow_server import MlflowServer
from skyward.hub.store.snapshots import snapshot_of
from skyward.testing.hub import HubServer
from tests.hub.services.hubs import ADMIN
from tests.hub.store.sources import NAMES, mlflow_database, open_source, unpack


@pytest.fixture(params=NAMES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ForeignRuns:
    return open_source(request.param, tmp_path)


def test_import_is_complete_and_adds_nothing_twice(source: ForeignRuns, database: Database, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    first = import_runs(source, database, blobs, ADMIN)
    assert first.problems == []
    counts = {kind: first.source[kind] for kind in ("experiments", "runs", "params", "points", "datasets", "artifacts")}
    expected = {"experiments": 3, "runs": 3, "params": 2, "points": 48, "datasets": 2, "artifacts": 6}
    if first.source["logged_models"]:  # of MLflow 3
        expected |= {"params": 3, "points": 52, "artifacts": 7}
    assert counts == expected
    assert first.is_complete
    assert import_runs(source, database, blobs, ADMIN) == first
    source.close()
    hub = Hub(database, blobs)

    async def look() -> None:
        experiment = await hub.tracking.experiment_named(ADMIN, "digits")
        assert experiment.tags == {"team": "vision"}
        page = await hub.tracking.search_runs(ADMIN, [experiment.id], order_by=["params.lr ASC"])
        failed, finished = page.items
        assert (failed.state.value, finished.state.value) == ("failed", "completed")
        assert (failed.name, failed.user, failed.started_at, failed.ended_at) == (
            "run 0",
            "ada",
            1_700_000_000_000,
            1_700_000_060_000,
        )
        assert failed.tags["kind"] == "small"
        (dataset,) = failed.inputs
        assert (dataset.name, dataset.digest, dataset.source_type) == ("digits", "0a1b2c", "http")
        assert (dataset.schema, dataset.profile) == ("[]", '{"rows": 9}')
        assert dataset.tags == {"mlflow.data.context": "training"}
        loss = await hub.tracking.history(ADMIN, failed.id, "loss")
        assert list(loss.values) == [1.0 / (step + 1) for step in range(20)]
        odd = list((await hub.tracking.history(ADMIN, failed.id, "odd")).values)
        assert math.isnan(odd[0])
        assert (odd[1] > 1e308, odd[2] < -1e308, odd[3]) == (True, True, 2.5)
        _, pieces = await hub.tracking.open_artifact(ADMIN, failed.id, "deep/er/table.csv")
        assert b"".join(pieces) == b"a,b\n1,2\n"
        assert (await hub.tracking.experiment_named(ADMIN, "binned")).lifecycle.value == "deleted"

    asyncio.run(look())


def test_import_that_broke_off_is_completed(database: Database, tmp_path: Path) -> None:
    unpack("mlruns", tmp_path)
    blobs = FolderBlobs(tmp_path / "blobs")
    for path in (tmp_path / "mlruns").glob("*/*/metrics/loss"):
        whole = path.read_text()
        path.write_text(whole[: len(whole) // 2].rpartition("\n")[0])
        import_runs(MlflowFolder(tmp_path / "mlruns"), database, blobs, ADMIN)
        path.write_text(whole)
        assert import_runs(MlflowFolder(tmp_path / "mlruns"), database, blobs, ADMIN).source["points"] > 0
        run = path.parents[1].name
        history = asyncio.run(Hub(database, blobs).tracking.history(ADMIN, run, "loss"))
        assert list(history.steps) == list(range(20))


def test_points_that_broken_imports_left_twice_do_not_hide_missing_ones(database: Database, tmp_path: Path) -> None:
    source, blobs = MlflowDatabase(mlflow_database("2.22.0", tmp_path)), FolderBlobs(tmp_path / "blobs")
    run = next(run for experiment in source.experiments() for run in source.runs(experiment.id) if run.params)
    hub = Hub(database, blobs)
    points = source.points(run.id)
    half = len(points) // 2
    part = PointColumns(points.keys[:half], points.steps[:half], points.timestamps[:half], points.values[:half])

    async def break_off_twice() -> None:
        await hub.tracking.create_run(ADMIN, "0", run_id=run.id)
        for _ in range(2):
            await hub.tracking.log_points(ADMIN, run.id, part)

    asyncio.run(break_off_twice())
    outcome = import_runs(source, database, blobs, ADMIN)
    assert outcome.is_complete
    assert len(asyncio.run(hub.tracking.history(ADMIN, run.id, "loss"))) == 20
    source.close()


def test_import_that_broke_off_among_models_is_completed(database: Database, tmp_path: Path) -> None:
    url, blobs = mlflow_database("3.17.2", tmp_path), FolderBlobs(tmp_path / "blobs")

    class Broken(MlflowDatabase):
        """A database that goes away behind its first logged model."""

        def logged_models(self, experiment: str) -> Iterator[ForeignLoggedModel]:
            for model in super().logged_models(experiment):
                yield model
                raise UsageError("source: went away")

    with pytest.raises(UsageError, match="went away"):
        import_runs(Broken(url), database, blobs, ADMIN)
    outcome = import_runs(MlflowDatabase(url), database, blobs, ADMIN)
    assert outcome.problems == []
    assert outcome.is_complete


def test_command_imports_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, data = mlflow_database("2.22.0", tmp_path), str(tmp_path / "hub")
    for _ in range(2):
        assert main(["hub", "import", url, "--data", data, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["source"] == found["hub"]
    with snapshot_of(f"sqlite:///{data}/hub.db") as snapshot:
        assert list(check_hub(snapshot, FolderBlobs(tmp_path / "hub" / "blobs"))) == []
    assert main(["hub", "import", url, "--data", data, "--project", "nowhere"]) == 1
    assert "project='nowhere': not found" in capsys.readouterr().err


def test_missing_artifacts_are_named_and_links_do_not_lead_out(database: Database, tmp_path: Path) -> None:
    url = mlflow_database("2.22.0", tmp_path)
    (tmp_path / "secret").write_text("secret")
    first = next((tmp_path / "artifacts-2.22.0").iterdir()) / "artifacts"
    (first / "link.txt").symlink_to(tmp_path / "secret")
    blobs = FolderBlobs(tmp_path / "blobs")
    assert import_runs(MlflowDatabase(url), database, blobs, ADMIN).source["artifacts"] == 6
    with sqlite3.connect(tmp_path / "2.22.0.db") as connection:
        connection.execute("UPDATE runs SET artifact_uri = 'gs://bucket/' || run_uuid")
    connection.close()
    outcome: Imported = import_runs(MlflowDatabase(url), database, blobs, ADMIN)
    assert len(outcome.problems) == 3
    assert "not on this machine" in outcome.problems[0]
    assert not outcome.is_complete


@pytest.mark.parametrize(
    "uri", ["{folder}/private", "file://{folder}/private", "{folder}/{run}/artifacts/../../private"]
)
def test_folder_that_mlflow_did_not_make_for_the_run_is_not_read(uri: str, database: Database, tmp_path: Path) -> None:
    url, blobs = mlflow_database("2.22.0", tmp_path), FolderBlobs(tmp_path / "blobs")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    with sqlite3.connect(tmp_path / "2.22.0.db") as connection:
        for (run,) in connection.execute("SELECT run_uuid FROM runs").fetchall():
            given = (uri.format(folder=tmp_path, run=run), run)
            connection.execute("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", given)
    connection.close()
    outcome = import_runs(MlflowDatabase(url), database, blobs, ADMIN)
    refused = [problem for problem in outcome.problems if "is no folder of its own" in problem]
    assert (len(refused), outcome.hub["artifacts"], outcome.hub["model_versions"]) == (3, 0, 3)  # of s3:// and runs:/


def test_address_of_artifacts_never_leaves_the_given_folder(tmp_path: Path) -> None:
    assert local_folder("mlflow-artifacts:/1/abc/artifacts", tmp_path) == tmp_path / "1" / "abc" / "artifacts"
    assert local_folder("mlflow-artifacts:/1/../../etc", tmp_path) is None
    assert local_folder("mlflow-artifacts:/1/abc", None) is None
    assert local_folder("s3://bucket/1", tmp_path) is None


@pytest.mark.parametrize("url", ["sqlite:////nowhere/mlflow.db", "nonsense://x", "sqlite://"])
def test_source_that_is_no_mlflow_is_refused_in_words(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="source"):
        MlflowDatabase(url)
    with pytest.raises(UsageError, match="has no experiment in it"):
        MlflowFolder(tmp_path)


def test_runs_of_a_live_server_are_imported_with_their_files(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer(tmp_path / "other") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", server.token)
        with httpx.Client(base_url=server.url, headers=server.headers) as client:
            run = client.post("/v1/runs", json={"experiment": "live", "params": {"lr": "1"}}).json()["id"]
            metrics = [{"key": "loss", "value": step, "step": step, "timestamp": step} for step in range(30)]
            client.post(f"/v1/runs/{run}/metrics", json={"metrics": metrics}).raise_for_status()
            for key in ("a.txt", "deep/er/b c.txt"):
                client.post(f"/v1/runs/{run}/artifacts", params={"key": key}, content=key.encode()).raise_for_status()
        blobs = FolderBlobs(tmp_path / "blobs")
        for _ in range(2):
            source = MlflowServer(server.url)
            outcome = import_runs(source, database, blobs, ADMIN)
            source.close()
            assert outcome.problems == []
            assert outcome.is_complete
            assert (outcome.source["points"], outcome.source["artifacts"]) == (30, 2)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "wrong")
        with pytest.raises(UsageError, match="status 401; check address and token"):
            list(MlflowServer(server.url).experiments())
    with pytest.raises(UsageError, match="does not answer"):
        list(MlflowServer(server.url).experiments())
