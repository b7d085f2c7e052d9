"""Registered models, by the part of MLflow's API that every hub has."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import HubError
from .connection import HubConnection

_API = "/api/2.0/mlflow"


def register(connection: HubConnection, name: str, run_id: str, artifact_path: str, tags: Mapping[str, str]) -> int:
    """Make a version of a model from an artifact of a run, and the model where it is missing. Return its number."""
    try:
        connection.json("POST", f"{_API}/registered-models/create", {"name": name})
    except HubError as error:
        if error.code != "RESOURCE_ALREADY_EXISTS":
            raise
    body = {
        "name": name,
        "source": f"runs:/{run_id}/{artifact_path}",
        "run_id": run_id,
        "tags": [{"key": key, "value": value} for key, value in tags.items()],
    }
    answer = connection.json("POST", f"{_API}/model-versions/create", body)
    return int(answer["model_version"]["version"])
