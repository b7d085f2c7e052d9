"""Import from MLflow's own server, while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from skyward.hub.services.hub import Hub
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.importing import import_runs
from skyward.hub.store.mlflow_server import MlflowServer
from tests.hub.services.hubs import ADMIN

from .programs import NEW, ROOT, mlflow_server, run_program


def test_everything_on_a_live_server_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    database = Database(f"sqlite:///{tmp_path}/hub.db")
    blobs = FolderBlobs(tmp_path / "blobs")
    with mlflow_server(tmp_path / "mlflow") as url:
        run_program(NEW, ["python", str(ROOT / "tests/hub/assets/make_mlflow.py"), url], tmp_path, {})
        outcome = import_runs(MlflowServer(url), database, blobs, ADMIN)
        assert outcome.problems == []
        assert outcome.is_complete
        assert outcome.source == {
            "experiments": 3, "runs": 3, "params": 3, "tags": outcome.source["tags"], "points": 52, "datasets": 2,
            "model_links": 2, "artifacts": 7, "logged_models": 1, "registered_models": 2, "model_versions": 6,
            "aliases": 1,
        }  # fmt: skip
        assert import_runs(MlflowServer(url), database, blobs, ADMIN) == outcome
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
