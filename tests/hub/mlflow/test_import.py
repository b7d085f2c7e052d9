"""Import from MLflow's own servers, while they run, and MLflow's clients on imported models."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from skyward.cli import main
from skyward.hub.services.hub import Hub
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.importing import import_runs
from skyward.hub.store.mlflow_database import MlflowDatabase
from skyward.hub.store.mlflow_folder import MlflowFolder
from skyward.hub.store.mlflow_server import MlflowServer
from skyward.hub.store.registry_tables import metadata
from skyward.testing.hub import HubServer
from tests.hub.services.hubs import ADMIN
from tests.hub.store.sources import mlflow_database

from .programs import NEW, OLD, ROOT, Scripts, mlflow_server

pytestmark = pytest.mark.timeout(600)  # a busy machine imports MLflow in a minute


WORKSPACE = "imported"
MAKE = ROOT / "tests/hub/assets/make_mlflow.py"


def test_everything_on_a_live_server_is_imported(mlflow_url: str, scripts: Scripts, tmp_path: Path) -> None:
    """The server is that of other tests, so all is in a workspace of its own."""
    httpx.post(f"{mlflow_url}/api/3.0/mlflow/workspaces", json={"name": WORKSPACE}).raise_for_status()
    scripts.run(NEW, MAKE, tmp_path, {"MLFLOW_WORKSPACE": WORKSPACE}, mlflow_url)
    source = MlflowServer(mlflow_url, workspace=WORKSPACE)
    database = Database(f"sqlite:///{tmp_path}/hub.db")
    blobs = FolderBlobs(tmp_path / "blobs")
    outcome = import_runs(source, database, blobs, ADMIN)
    assert outcome.problems == []
    assert outcome.is_complete
    assert outcome.source == {
        "experiments": 2, "runs": 3, "params": 3, "tags": outcome.source["tags"], "points": 52, "datasets": 2,
        "model_links": 2, "artifacts": 7, "logged_models": 1, "registered_models": 2, "model_versions": 6,
        "aliases": 1,
    }  # fmt: skip
    assert import_runs(source, database, blobs, ADMIN) == outcome
    hub = Hub(database, blobs)

    async def look() -> None:
        first, second = [await hub.registry.version(ADMIN, "digits", number) for number in (1, 2)]
        assert second.location == f"runs:/{second.run_id}/model"
        model = await hub.registry.logged_model(ADMIN, first.source.removeprefix("models:/"))
        assert first.location == model.artifact_uri
        _, pieces = await hub.tracking.open_artifact(ADMIN, f"models/{model.id}", "weights")
        assert b"".join(pieces) == b"logged"
        fifth = await hub.registry.version(ADMIN, "digits", 5)
        assert (fifth.source, fifth.location) == ("models:/digits/2", second.location)
        await hub.close()

    asyncio.run(look())


@pytest.mark.parametrize("kind", ["database", "folder"])
def test_server_of_the_older_mlflow_and_its_own_store_hold_the_same(
    kind: str, scripts: Scripts, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db" if kind == "database" else str(tmp_path / "mlruns")
    database = Database(f"sqlite:///{tmp_path}/hub.db")
    blobs = FolderBlobs(tmp_path / "blobs")
    with mlflow_server(tmp_path, OLD, store) as url:
        scripts.run(OLD, MAKE, tmp_path, {}, url)
        served = import_runs(MlflowServer(url), database, blobs, ADMIN)
        assert served.problems == []
        assert served.source == served.hub
        assert +served.source == {
            "experiments": 3, "runs": 3, "params": 2, "tags": served.source["tags"], "points": 48, "datasets": 2,
            "artifacts": 6, "registered_models": 2, "model_versions": 6, "aliases": 1,
        }  # fmt: skip
        before = rows(tmp_path)
        assert import_runs(MlflowServer(url), database, blobs, ADMIN) == served
        assert rows(tmp_path) == before
    artifacts = tmp_path / "artifacts"
    opened = MlflowDatabase(store, artifacts) if kind == "database" else MlflowFolder(Path(store), artifacts)
    assert import_runs(opened, database, blobs, ADMIN) == served
    after = rows(tmp_path)
    changed = [table for table in after if after[table] != before[table]]
    assert changed == ["model_version"]  # of a deleted version, of which a server tells nothing
    assert import_runs(opened, database, blobs, ADMIN) == served
    assert rows(tmp_path) == after
    opened.close()


def rows(folder: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return all rows of a hub's tables but those that tell of the imports themselves."""
    with closing(sqlite3.connect(folder / "hub.db")) as connection:
        return {
            table: connection.execute(f'SELECT * FROM "{table}"').fetchall()
            for table in metadata.tables
            if table not in {"audit", "event"}
        }


@pytest.mark.parametrize("client", [OLD, NEW])
@pytest.mark.parametrize("source", [OLD, NEW])
def test_clients_download_imported_versions(client: str, source: str, scripts: Scripts, tmp_path: Path) -> None:
    url = mlflow_database(source, tmp_path)
    assert main(["hub", "import", url, "--data", str(tmp_path / "hub")]) == 0
    second = dict.fromkeys(["models:/digits/2", "models:/digits/3", "models:/digits/5", "models:/digits@champion"], "1")
    expected = {"models:/digits/1": "logged" if source == NEW else "0", **second}
    with HubServer(tmp_path / "hub") as server:
        variables = {"MLFLOW_TRACKING_URI": server.url, "MLFLOW_TRACKING_TOKEN": server.token}
        script = Path(__file__).parent / "scripts/downloads.py"
        printed = scripts.run(client, script, tmp_path, variables, *expected)
    lines = [line for line in printed.splitlines() if line.startswith("models:")]
    assert dict(line.rsplit(" ", 1) for line in lines) == expected
