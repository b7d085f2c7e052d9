"""Reader of a live MLflow server, by the API that MLflow's clients use."""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ...errors import UsageError
from ..model.foreign import (
    MLFLOW_MODEL_STATUS,
    MLFLOW_STATES,
    ForeignExperiment,
    ForeignFile,
    ForeignFiles,
    ForeignLoggedModel,
    ForeignModel,
    ForeignRun,
    stage_named,
)
from ..model.points import PointColumns
from ..model.registry import PROMPT_TAG, LoggedModel, ModelMetric, ModelStatus, ModelVersion, RegisteredModel
from ..model.runs import DatasetInput, Lifecycle, ModelLink, RunState
from .blobs import PIECE
from .mlflow_files import PROXY, ArtifactRoots

TIMEOUT_S = 60.0
_PAGE = 1000
_POINTS = 25_000
_MODELS_PAGE = 50
_NAMED_MODEL = re.compile(r"models:/(?!m-[0-9a-f]{32}/?$)")
"""Beginning of a source that is another version."""
_PROMPTS = f"tags.`{PROMPT_TAG}` = 'true'"
"""Filter that finds prompts, which other searches leave out."""


class MlflowServer:
    """A server at `http://` or `https://`.

    MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, sign in.

    Args:
        url: Its address.
        artifact_root: Folder in place of artifacts that the server does not hand out.
        workspace: Workspace of MLflow 3.
    """

    def __init__(self, url: str, artifact_root: Path | None = None, workspace: str = "default") -> None:
        self._url, self._root, self._roots = url.rstrip("/"), artifact_root, ArtifactRoots(artifact_root)
        self._headers = {"Content-Type": "application/json", **_credentials(os.environ)}
        if workspace != "default":
            self._headers["X-MLFLOW-WORKSPACE"] = workspace
        self._metrics: dict[str, list[str]] = {}

    def experiments(self) -> Iterator[ForeignExperiment]:
        for row in self._pages("experiments/search", "experiments", {"view_type": "ALL"}):
            yield ForeignExperiment(
                id=row["experiment_id"],
                name=row["name"],
                lifecycle=_lifecycle(row),
                tags=_values(row.get("tags")),
            )

    def runs(self, experiment: str) -> Iterator[ForeignRun]:
        query = {"experiment_ids": [experiment], "run_view_type": "ALL"}
        for found in self._pages("runs/search", "runs", query):
            # MLflow's search leaves out the models that a run read.
            row = self._json("GET", "mlflow/runs/get", {"run_id": found["info"]["run_id"]})["run"]
            info, data = row["info"], row.get("data", {})
            tags = _values(data.get("tags"))
            self._metrics[info["run_id"]] = [metric["key"] for metric in data.get("metrics", [])]
            yield ForeignRun(
                id=info["run_id"],
                name=info.get("run_name") or tags.get("mlflow.runName", ""),
                user=info.get("user_id") or "",
                state=MLFLOW_STATES.get(info["status"], RunState.FAILED),
                lifecycle=_lifecycle(info),
                started_at=int(info.get("start_time") or 0),
                ended_at=int(info["end_time"]) if info.get("end_time") else None,
                artifact_uri=info.get("artifact_uri") or "",
                files=self._files(info.get("artifact_uri") or "", info["run_id"]),
                params=_values(data.get("params")),
                tags=tags,
                inputs=[_dataset(item) for item in row.get("inputs", {}).get("dataset_inputs", [])],
                models=_links(row),
            )

    def points(self, run: str) -> PointColumns:
        columns = PointColumns()
        for key in self._metrics[run]:
            query = {"run_id": run, "metric_key": key, "max_results": str(_POINTS)}
            found = set()
            for answer in self._answers("GET", "metrics/get-history", query):
                for metric in answer.get("metrics", []):
                    value = repr(float(metric["value"]))  # a NaN differs from itself
                    found.add((int(metric["timestamp"]), int(metric.get("step", 0)), value))
            for at, step, value in sorted(found):
                columns.append(key, step, at, float(value))
        return columns

    def logged_models(self, experiment: str) -> Iterator[ForeignLoggedModel]:
        query = {"experiment_ids": [experiment], "max_results": _MODELS_PAGE}
        for answer in self._answers("POST", "logged-models/search", query, may_lack=True):
            for row in answer.get("models", []):
                info, data = row["info"], row.get("data", {})
                model_id = info["model_id"]
                model = LoggedModel(
                    pk=0,
                    id=model_id,
                    experiment_id=experiment,
                    name=info["name"],
                    status=MLFLOW_MODEL_STATUS.get(str(info.get("status")), ModelStatus.PENDING),
                    lifecycle=Lifecycle.ACTIVE,
                    owner="",
                    created_at=int(info["creation_timestamp_ms"]),
                    updated_at=int(info["last_updated_timestamp_ms"]),
                    artifact_uri=info["artifact_uri"],
                    kind=info.get("model_type") or None,
                    run_id=info.get("source_run_id") or None,
                    params=_values(data.get("params")),
                    tags=_values(info.get("tags")),
                    metrics=[_model_metric(metric, model_id) for metric in data.get("metrics", [])],
                )
                yield ForeignLoggedModel(model=model, files=self._files(model.artifact_uri, model_id))

    def registered_models(self) -> Iterator[ForeignModel]:
        for search in ({}, {"filter": _PROMPTS}):
            for answer in self._answers("GET", "registered-models/search", {"max_results": _PAGE, **search}):
                for row in answer.get("registered_models", []):
                    yield self._registered_model(row)

    def close(self) -> None:
        """Do nothing: each answer is closed once it was read."""

    def _registered_model(self, row: Mapping[str, Any]) -> ForeignModel:
        name, created_at = row["name"], int(row.get("creation_timestamp") or 0)
        model = RegisteredModel(
            id=0,
            name=name,
            owner="",
            created_at=created_at,
            updated_at=int(row.get("last_updated_timestamp") or created_at),
            description=row.get("description") or None,
            tags=_values(row.get("tags")),
            aliases={alias["alias"]: int(alias["version"]) for alias in row.get("aliases", [])},
        )
        quoted = name.replace("'", "''")
        kind = f" AND {_PROMPTS}" if model.tags.get(PROMPT_TAG) == "true" else ""
        query = {"filter": f"name='{quoted}'{kind}", "max_results": _PAGE}
        answers = self._answers("GET", "model-versions/search", query)
        versions = [self._version(version) for answer in answers for version in answer.get("model_versions", [])]
        versions.sort(key=lambda version: version.version)
        return ForeignModel(model=model, versions=versions, last_number=versions[-1].version if versions else 0)

    def _version(self, row: Mapping[str, Any]) -> ModelVersion:
        name, source, created_at = row["name"], row.get("source") or "", int(row.get("creation_timestamp") or 0)
        location = source
        if _NAMED_MODEL.match(source):
            place = {"name": name, "version": row["version"]}
            location = self._json("GET", "mlflow/model-versions/get-download-uri", place).get("artifact_uri") or source
        return ModelVersion(
            name=name,
            version=int(row["version"]),
            stage=stage_named(row.get("current_stage")),
            source=source,
            location=location,
            created_at=created_at,
            updated_at=int(row.get("last_updated_timestamp") or created_at),
            owner=row.get("user_id") or "",
            description=row.get("description") or None,
            run_id=row.get("run_id") or None,
            run_link=row.get("run_link") or None,
            tags=_values(row.get("tags")),
        )

    def _files(self, uri: str, owner: str) -> ForeignFiles | None:
        """Return the files at an address: of this machine, of S3, or those that the server hands out."""
        if uri.startswith(PROXY) and self._root is None:
            return partial(self._served, urlsplit(uri).path.strip("/"), "")
        return self._roots.files(uri, owner)

    def _served(self, base: str, folder: str) -> Iterator[ForeignFile]:
        query = {"path": f"{base}/{folder}".rstrip("/")}
        for row in self._json("GET", "mlflow-artifacts/artifacts", query).get("files", []):
            key = f"{folder}/{row['path'].rpartition('/')[2]}".lstrip("/")
            if not row.get("is_dir"):
                address = f"mlflow-artifacts/artifacts/{quote(f'{base}/{key}')}"
                size = row.get("file_size")  # missing where it is 0, or where its store tells none
                yield ForeignFile(key, None if size is None else int(size), partial(self._download, address))
            elif len(key) > len(folder):  # a folder in itself would have no end
                yield from self._served(base, key)

    def _download(self, address: str) -> Iterator[bytes]:
        with self._open("GET", address, None) as answer:
            yield from iter(lambda: answer.read(PIECE), b"")

    def _pages(self, path: str, plural: str, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for answer in self._answers("POST", path, {**query, "max_results": _PAGE}):
            yield from answer.get(plural, [])

    def _answers(
        self, method: str, path: str, query: Mapping[str, Any], *, may_lack: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield the answers of a list, page by page. With `may_lack`, a server without the route has none."""
        token: str | None = None
        while True:
            given = {**query, **({} if token is None else {"page_token": token})}
            try:
                answer = self._json(method, f"mlflow/{path}", given)
            except _NoRoute:
                if may_lack:
                    return
                raise
            yield answer
            following = answer.get("next_page_token")
            if not following or following == token:
                return
            token = following

    def _json(self, method: str, path: str, query: Mapping[str, Any]) -> dict[str, Any]:
        body = json.dumps(query).encode() if method == "POST" else None
        with self._open(method, path if body else f"{path}?{urlencode(query)}", body) as answer:
            text = answer.read()
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UsageError(f"source={self._url!r}: {path} is not answered with JSON; check that MLflow listens there")
        return content

    def _open(self, method: str, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(f"{self._url}/api/2.0/{path}", data=body, headers=self._headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                problem = f"{path.partition('?')[0]} is answered with status {error.code}"
            kind = _NoRoute if error.code in (404, 405) else UsageError
            raise kind(f"source={self._url!r}: {problem}; check address and token") from None
        except OSError as error:
            raise UsageError(f"source={self._url!r}: does not answer ({error}); check the address") from None


class _NoRoute(UsageError):
    """The server is older than a route."""


def _dataset(row: Mapping[str, Any]) -> DatasetInput:
    dataset = row["dataset"]
    return DatasetInput(
        name=dataset["name"],
        digest=dataset["digest"],
        source_type=dataset["source_type"],
        source=dataset["source"],
        schema=dataset.get("schema") or None,
        profile=dataset.get("profile") or None,
        tags=_values(row.get("tags")),
    )


def _links(row: Mapping[str, Any]) -> list[ModelLink]:
    read = row.get("inputs", {}).get("model_inputs", [])
    made = row.get("outputs", {}).get("model_outputs", [])
    links = [ModelLink(link["model_id"], "input") for link in read]
    return links + [ModelLink(link["model_id"], "output", int(link.get("step") or 0)) for link in made]


def _model_metric(row: Mapping[str, Any], model_id: str) -> ModelMetric:
    return ModelMetric(
        key=row["key"],
        value=float(row["value"]),
        timestamp=int(row["timestamp"]),
        step=int(row.get("step") or 0),
        run_id=row.get("run_id") or "",
        model_id=model_id,
        dataset_name=row.get("dataset_name") or None,
        dataset_digest=row.get("dataset_digest") or None,
    )


def _credentials(environment: Mapping[str, str]) -> dict[str, str]:
    if token := environment.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if user := environment.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{user}:{environment.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _lifecycle(row: Mapping[str, Any]) -> Lifecycle:
    return Lifecycle.DELETED if row.get("lifecycle_stage") == "deleted" else Lifecycle.ACTIVE


def _values(rows: list[dict[str, str]] | None) -> dict[str, str]:
    return {row["key"]: row.get("value", "") for row in rows or []}
