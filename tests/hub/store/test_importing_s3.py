"""Import of artifacts that MLflow keeps in S3."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path

import pytest

from skyward.errors import MissingDependency, UsageError
from skyward.hub.services.hub import Hub
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.importing import import_runs
from skyward.hub.store.mlflow_database import MlflowDatabase
from tests.hub.s3 import S3Server
from tests.hub.services.hubs import ADMIN
from tests.hub.store.sources import mlflow_database


def database_in(bucket: str, folder: Path) -> str:
    """Make an MLflow database whose artifacts are in a bucket, and return its address."""
    url = mlflow_database("2.22.0", folder)
    root = folder / "artifacts-2.22.0"
    with sqlite3.connect(folder / "2.22.0.db") as connection:
        for column in ("runs.artifact_uri", "model_versions.source", "model_versions.storage_location"):
            table, _, name = column.partition(".")
            connection.execute(f"UPDATE {table} SET {name} = replace({name}, '{root}', 's3://{bucket}/mlflow')")
    connection.close()
    return url


def upload(s3: S3Server, bucket: str, root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            s3.client().put_object(Bucket=bucket, Key=f"mlflow/{path.relative_to(root)}", Body=path.read_bytes())


@pytest.fixture
def keys(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.mark.usefixtures("keys")
def test_artifacts_in_a_bucket_are_copied_once(s3: S3Server, database: Database, tmp_path: Path) -> None:
    bucket = s3.new_bucket().name
    url, blobs = database_in(bucket, tmp_path), FolderBlobs(tmp_path / "blobs")
    upload(s3, bucket, tmp_path / "artifacts-2.22.0")
    s3.client().put_object(Bucket=bucket, Key="mlflow/", Body=b"")  # a folder, as consoles make them
    outcome = import_runs(MlflowDatabase(url), database, blobs, ADMIN)
    assert outcome.problems == []
    assert (outcome.source["artifacts"], outcome.is_complete) == (6, True)
    assert import_runs(MlflowDatabase(url), database, blobs, ADMIN) == outcome
    hub = Hub(database, blobs)

    async def look() -> None:
        version = await hub.registry.version(ADMIN, "digits", 2)
        assert version.location == f"runs:/{version.run_id}/model"
        _, pieces = await hub.tracking.open_artifact(ADMIN, version.run_id or "", "model/weights")
        assert b"".join(pieces) == b"1"

    asyncio.run(look())


@pytest.mark.usefixtures("keys")
def test_bucket_that_is_refused_is_a_problem_of_each_run(database: Database, tmp_path: Path) -> None:
    url = database_in("nobodys-bucket", tmp_path)
    outcome = import_runs(MlflowDatabase(url), database, FolderBlobs(tmp_path / "blobs"), ADMIN)
    assert outcome.hub["points"] == outcome.source["points"] > 0
    refused = [problem for problem in outcome.problems if problem.startswith("run ")]
    assert len(refused) == 3
    assert "cannot be read" in refused[0]
    assert "NoSuchBucket" in refused[0]


def test_s3_that_is_away_and_missing_packages_are_named(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: None
) -> None:
    url, blobs = database_in("bucket", tmp_path), FolderBlobs(tmp_path / "blobs")
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(UsageError, match="S3 cannot be used: .*check MLFLOW_S3_ENDPOINT_URL"):
        import_runs(MlflowDatabase(url), database, blobs, ADMIN)
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "nonsense")
    with pytest.raises(UsageError, match="MLFLOW_S3_ENDPOINT_URL='nonsense'"):
        import_runs(MlflowDatabase(url), database, blobs, ADMIN)
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "skyward.hub.store.mlflow_s3")
    with pytest.raises(MissingDependency, match=r"are in S3, which needs boto3; pip install 'skyward\[hub-s3\]'"):
        import_runs(MlflowDatabase(url), database, blobs, ADMIN)
