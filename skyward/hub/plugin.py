"""Entry points of MLflow: its API with the hub's spool behind it.

    MLFLOW_TRACKING_URI=skyward://127.0.0.1:8057 SKYWARD_HUB_TOKEN=sky_... python train.py

Metrics, parameters and tags go to the spool, so `mlflow.log_metric` takes microseconds and never waits. Everything else
goes over MLflow's HTTP API, after the records of the run that it concerns. MLflow loads this module, and it imports
MLflow only within its functions, so that skyward works without it.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

from ..errors import UsageError
from .client.active import ActiveRun, RunSpec
from .client.connection import PROJECT_HEADER
from .client.settings import PROJECT, TOKEN, Address, address_of, checked_url, spool_folder
from .model.product import PREFIX

READ_S, END_S = 10.0, 60.0
"""Seconds that a read, and the end of a run, wait for the records before them."""
_ARTIFACTS = "/mlflow-artifacts/artifacts"
_FINAL = frozenset({"FINISHED", "FAILED", "KILLED"})


class SpooledRuns:
    """Runs that this process logs to through MLflow, by id. Thread-safe."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._runs: dict[str, ActiveRun] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)

    def run(self, run_id: str) -> ActiveRun:
        """Return the spool of a run."""
        run = self._runs.get(run_id)
        if run is None:
            with self._lock:
                run = self._runs.get(run_id)
                if run is None:
                    spec = RunSpec(id=run_id)
                    run = ActiveRun(spec, spool=spool_folder(), address=self._address, writes_start=False)
                    self._runs[run_id] = run
        return run

    def flush(self, run_id: str | None = None, timeout_s: float = READ_S) -> None:
        """Wait until the hub has what was logged to a run, or to all runs."""
        with self._lock:
            chosen = [run for name, run in self._runs.items() if run_id in {None, name}]
        for run in chosen:
            run.flush(timeout_s)

    def end(self, run_id: str) -> None:
        """Send the rest of a run and close its file."""
        with self._lock:
            run = self._runs.pop(run_id, None)
        if run is not None:
            run.close(END_S)

    def close(self) -> None:
        """Send the rest of all runs; called when the program ends."""
        deadline = time.monotonic() + READ_S
        for run_id in list(self._runs):
            with self._lock:
                run = self._runs.pop(run_id, None)
            if run is not None:
                run.close(max(0.5, deadline - time.monotonic()))

    def log_batch(self, run_id: str, metrics: Iterable[Any], params: Iterable[Any], tags: Iterable[Any]) -> None:
        """Log entities of MLflow. Metrics of one step and time become one record."""
        run = self.run(run_id)
        texts = {param.key: param.value for param in params}
        if texts:
            run.log_params(texts)
        notes = {tag.key: tag.value for tag in tags}
        if notes:
            run.set_tags(notes)
        moments: list[tuple[int, int, dict[str, float]]] = []
        for metric in metrics:
            last = moments[-1] if moments else None
            if last is None or last[:2] != (metric.step, metric.timestamp) or metric.key in last[2]:
                moments.append((metric.step, metric.timestamp, {metric.key: metric.value}))
            else:
                last[2][metric.key] = metric.value
        run.log_metric_rows(moments)


def tracking_store(store_uri: str | None = None, artifact_uri: str | None = None) -> Any:
    """Return MLflow's tracking store of a hub; entry point of `mlflow.tracking_store`."""
    return _tracking_class()(_address(store_uri))


def registry_store(store_uri: str | None = None, tracking_uri: str | None = None) -> Any:
    """Return MLflow's model registry of a hub; entry point of `mlflow.model_registry_store`."""
    from mlflow.store.model_registry.rest_store import RestStore

    return RestStore(functools.partial(_credentials, _address(store_uri or tracking_uri).url))


def artifact_repository(artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> Any:
    """Return MLflow's artifacts of a hub; entry point of `mlflow.artifact_repository`.

    It serves `mlflow-artifacts:` too, the form in which a hub names artifacts, because MLflow's own class refuses every
    tracking URI but http. With another tracking URI than a hub's, MLflow's own class is returned.
    """
    from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository
    from mlflow.tracking import get_tracking_uri

    # MLflow 2 gives no further addresses, and its class takes none.
    given = {"tracking_uri": tracking_uri, "registry_uri": registry_uri} if tracking_uri or registry_uri else {}
    tracking = tracking_uri or get_tracking_uri()
    scheme = artifact_uri.partition(":")[0]
    if scheme in _SCHEMES:
        tracking, artifact_uri = artifact_uri, "mlflow-artifacts:" + _path_of(artifact_uri)
    if tracking.partition(":")[0] not in _SCHEMES:
        return MlflowArtifactsRepository(artifact_uri, **given)
    host = checked_url(_without_path(tracking) if scheme in _SCHEMES else tracking)
    return _artifact_class()(MlflowArtifactsRepository.resolve_uri(artifact_uri, host))


class ProjectHeader:
    """Adds the project to MLflow's requests to a hub; entry point of `mlflow.request_header_provider`."""

    def in_context(self) -> bool:
        """Return whether requests go to a hub of a named project."""
        from mlflow.tracking import get_registry_uri, get_tracking_uri

        if not os.environ.get(PROJECT):
            return False
        return any(uri().partition(":")[0] in _SCHEMES for uri in (get_tracking_uri, get_registry_uri))

    def request_headers(self) -> dict[str, str]:
        """Return the headers."""
        return {PROJECT_HEADER: os.environ[PROJECT]}


@functools.cache
def _tracking_class() -> Any:  # noqa: C901  (the methods of a class that exists only where MLflow does)
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
    from mlflow.store.tracking.rest_store import RestStore

    class SpoolingStore(RestStore):  # type: ignore[misc]  # MLflow is no package of the environment that mypy sees
        def __init__(self, address: Address) -> None:
            super().__init__(functools.partial(_credentials, address.url))
            self._spooled = SpooledRuns(address)

        def _spool(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
            try:
                self._spooled.log_batch(run_id, metrics, params, tags)
            except UsageError as error:
                raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from error

        def log_metric(self, run_id: str, metric: Any) -> None:
            if getattr(metric, "model_id", None) or getattr(metric, "dataset_name", None):
                super().log_metric(run_id, metric)  # the spool knows neither models nor data sets of a metric
                return
            try:
                run = self._spooled.run(run_id)
                run.log_metrics({metric.key: metric.value}, metric.step, timestamp=metric.timestamp)
            except UsageError as error:
                raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from error

        def log_param(self, run_id: str, param: Any) -> None:
            self._spool(run_id, params=[param])

        def set_tag(self, run_id: str, tag: Any) -> None:
            self._spool(run_id, tags=[tag])

        def delete_tag(self, run_id: str, key: str) -> None:
            self._spooled.flush(run_id)  # MLflow reports a tag that is not there
            super().delete_tag(run_id, key)

        def log_batch(self, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
            linked = [metric for metric in metrics if getattr(metric, "model_id", None)]
            if linked:
                super().log_batch(run_id, linked, [], [])
            self._spool(run_id, [metric for metric in metrics if metric not in linked], params, tags)

        def update_run_info(self, run_id: str, run_status: Any, end_time: Any, run_name: Any) -> Any:
            from mlflow.entities import RunStatus

            if run_status is not None and RunStatus.to_string(run_status) in _FINAL:
                self._spooled.end(run_id)
            return super().update_run_info(run_id, run_status, end_time, run_name)

        def get_run(self, run_id: str) -> Any:
            self._spooled.flush(run_id)
            return super().get_run(run_id)

        def get_metric_history(self, run_id: str, *given: Any, **named: Any) -> Any:
            self._spooled.flush(run_id)
            return super().get_metric_history(run_id, *given, **named)

        def _search_runs(self, *given: Any, **named: Any) -> Any:
            self._spooled.flush()
            return super()._search_runs(*given, **named)

        def delete_run(self, run_id: str) -> None:
            self._spooled.end(run_id)
            super().delete_run(run_id)

    return SpoolingStore


@functools.cache
def _artifact_class() -> Any:
    from mlflow.entities import FileInfo
    from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
    from mlflow.utils.rest_utils import augmented_raise_for_status, http_request
    from mlflow.utils.uri import validate_path_is_safe

    class HubArtifacts(HttpArtifactRepository):  # type: ignore[misc]  # as above
        @property
        def _host_creds(self) -> Any:
            return _credentials(self.artifact_uri)

        def list_artifacts(self, path: str | None = None) -> Any:
            """List a folder. MLflow's own method asks without the credentials of this class."""
            url, _, root = self.artifact_uri.partition(_ARTIFACTS)
            folder = "/".join(part for part in (root.strip("/"), path) if part)
            answer = http_request(_credentials(url), _ARTIFACTS, "GET", params={"path": folder})
            augmented_raise_for_status(answer)
            files = []
            for file in answer.json().get("files", []):
                name = validate_path_is_safe(file["path"])
                size = None if file["is_dir"] else int(file["file_size"])
                files.append(FileInfo(f"{path}/{name}" if path else name, file["is_dir"], size))
            return sorted(files, key=lambda file: str(file.path))

    return HubArtifacts


_SCHEMES = (PREFIX, f"{PREFIX}+https")


def _address(uri: str | None) -> Address:
    from mlflow.tracking import get_tracking_uri

    address = address_of(uri or get_tracking_uri(), _token())
    assert address is not None
    return address


def _token() -> str | None:
    return os.environ.get(TOKEN) or os.environ.get("MLFLOW_TRACKING_TOKEN") or None


def _credentials(url: str) -> Any:
    """Return MLflow's credentials for an http address, with a hub's token where MLflow has none."""
    from mlflow.utils.credentials import get_default_host_creds

    made = get_default_host_creds(url)
    if made.token is None and made.username is None:
        made.token = _token()
    return made


def _path_of(uri: str) -> str:
    return "/" + uri.partition("://")[2].partition("/")[2]


def _without_path(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


__all__ = ["ProjectHeader", "SpooledRuns", "artifact_repository", "registry_store", "tracking_store"]
