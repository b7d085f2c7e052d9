"""Registered models, by the part of MLflow's API that every hub has."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import HubError, UsageError
from .connection import HubConnection, path_of
from .names import check_key

_API = "/api/2.0/mlflow"


def register(connection: HubConnection, name: str, run_id: str, artifact_path: str, tags: Mapping[str, object]) -> int:
    """Make a version of a model from an artifact of a run, and the model where it is missing. Return its number.

    `artifact_path` may be the URL of a checkpoint too, which no training deletes from then on.

    Raises:
        UsageError: the run has no such artifact.
        CheckpointNotFound: no checkpoint is at the URL.
        OSError: its store does not answer, or this process may not write there.
        HubError: the hub refuses the model.
    """
    texts = [{"key": check_key(key), "value": str(value)} for key, value in tags.items()]
    if is_url := "://" in artifact_path:
        from ...training.checkpoint.retention import keep_for_model

        keep_for_model(artifact_path, name)  # first: a version must not name what may be deleted
    else:
        _check_artifact(connection, run_id, check_key(artifact_path, "artifact_path"))
    try:
        connection.json("POST", f"{_API}/registered-models/create", {"name": name})
    except HubError as error:
        if error.code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = artifact_path if is_url else f"runs:/{run_id}/{artifact_path}"
    body = {"name": name, "source": source, "run_id": run_id, "tags": texts}
    answer = connection.json("POST", f"{_API}/model-versions/create", body)
    return int(answer["model_version"]["version"])


def _check_artifact(connection: HubConnection, run_id: str, artifact_path: str) -> None:
    """Raise `UsageError` unless the run has this file or folder. The hub itself takes any path, as MLflow does."""
    folder, _, _ = artifact_path.rpartition("/")
    listed = connection.json("GET", path_of("v1", "runs", run_id, "artifacts"), query={"prefix": folder or None})
    if artifact_path not in {row["key"] for row in listed["artifacts"]}:
        raise UsageError(
            f"artifact_path={artifact_path!r:.80}: the run has no such artifact; log it first with log_artifact",
            field="artifact_path",
            value=artifact_path,
        )
