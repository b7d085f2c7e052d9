"""Reader of a live MLflow server, by the API that MLflow's clients use."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ...errors import UsageError
from ..model.foreign import MLFLOW_STATES, ForeignExperiment, ForeignRun, local_folder
from ..model.names import check_artifact_key
from ..model.points import PointColumns
from ..model.runs import Lifecycle, RunState
from .blobs import PIECE

TIMEOUT_S = 60.0
_PROXY = "mlflow-artifacts:"
_PAGE = 1000
_POINTS = 25_000


class MlflowServer:
    """A server at `http://` or `https://`.

    MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, sign in.

    Args:
        url: Its address.
        artifact_root: Folder in place of artifacts that the server does not hand out.
        workspace: Workspace of MLflow 3.
    """

    def __init__(self, url: str, artifact_root: Path | None = None, workspace: str = "default") -> None:
        self._url, self._root = url.rstrip("/"), artifact_root
        self._headers = {"Content-Type": "application/json", **_credentials(os.environ)}
        if workspace != "default":
            self._headers["X-MLFLOW-WORKSPACE"] = workspace
        self._metrics: dict[str, list[str]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="skyward-import-"))

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
        for row in self._pages("runs/search", "runs", query):
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
                artifacts=self._artifacts(info["run_id"], info.get("artifact_uri") or ""),
                params=_values(data.get("params")),
                tags=tags,
            )

    def points(self, run: str) -> PointColumns:
        columns = PointColumns()
        for key in self._metrics[run]:
            query = {"run_id": run, "metric_key": key, "max_results": str(_POINTS)}
            found = set()
            for answer in self._answers("GET", "metrics/get-history", query):
                for metric in answer.get("metrics", []):
                    found.add((int(metric["timestamp"]), int(metric.get("step", 0)), str(metric["value"])))
            for at, step, value in sorted(found):
                columns.append(key, step, at, float(value))
        return columns

    def close(self) -> None:
        """Delete the artifacts that were downloaded."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _artifacts(self, run: str, uri: str) -> Path | None:
        """Download the files of a run, unless they are on this machine. Those of the run before are deleted."""
        here = local_folder(uri, self._root)
        if here is not None or not uri.startswith(_PROXY):
            return here
        self.close()
        folder = self._folder / "files"
        folder.mkdir(parents=True)
        base = urlsplit(uri).path.strip("/")
        for key in self._keys(run, None):
            check_artifact_key(key)  # before it becomes a path
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            address = f"mlflow-artifacts/artifacts/{quote(f'{base}/{key}')}"
            with path.open("wb") as file, self._open("GET", address, None) as answer:
                shutil.copyfileobj(answer, file, PIECE)
        return folder

    def _keys(self, run: str, folder: str | None) -> Iterator[str]:
        query = {"run_id": run} | ({} if folder is None else {"path": folder})
        for answer in self._answers("GET", "artifacts/list", query):
            for row in answer.get("files", []):
                if not row.get("is_dir"):
                    yield row["path"]
                elif folder is None or row["path"].startswith(f"{folder}/"):  # a folder in itself would have no end
                    yield from self._keys(run, row["path"])

    def _pages(self, path: str, plural: str, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for answer in self._answers("POST", path, {**query, "max_results": _PAGE}):
            yield from answer.get(plural, [])

    def _answers(self, method: str, path: str, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answers of a list, page by page."""
        token: str | None = None
        while True:
            given = {**query, **({} if token is None else {"page_token": token})}
            answer = self._json(method, f"mlflow/{path}", given)
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
            raise UsageError(f"source={self._url!r}: {problem}; check address and token") from None
        except OSError as error:
            raise UsageError(f"source={self._url!r}: does not answer ({error}); check the address") from None


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
