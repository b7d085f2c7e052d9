"""Reader of an `mlruns` folder, as MLflow's file store wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from ...errors import UsageError
from ..model.foreign import (
    MLFLOW_DELETED_STAGE,
    MLFLOW_STATES,
    ForeignExperiment,
    ForeignFiles,
    ForeignLoggedModel,
    ForeignModel,
    ForeignRun,
    stage_named,
)
from ..model.points import PointColumns
from ..model.registry import LoggedModel, ModelMetric, ModelStatus, ModelVersion, RegisteredModel
from ..model.runs import DatasetInput, Lifecycle, ModelLink, RunState
from .mlflow_files import PROXY, ArtifactRoots, folder_files

_STATUS = {1: "RUNNING", 2: "SCHEDULED", 3: "FINISHED", 4: "FAILED", 5: "KILLED"}
_MODEL_STATUS = {1: ModelStatus.PENDING, 2: ModelStatus.READY, 3: ModelStatus.FAILED}
_META = "meta.yaml"
_TRASH = ".trash"


class MlflowFolder:
    """An `mlruns` folder. Files of a run are read beside its metrics, wherever the folder was copied to.

    A server that hands out artifacts keeps them in a folder of its own.

    Args:
        folder: The folder.
        artifact_root: That folder of the server.

    Raises:
        UsageError: There is no experiment in it.
    """

    def __init__(self, folder: Path, artifact_root: Path | None = None) -> None:
        self._registry, self._roots = folder / "models", ArtifactRoots(artifact_root)
        self._folders: dict[str, Path] = {}
        for path in chain(sorted(folder.glob(f"*/{_META}")), sorted(folder.glob(f"{_TRASH}/*/{_META}"))):
            self._folders[path.parent.name] = path.parent
        if not self._folders:
            raise UsageError(f"source={str(folder)!r}: has no experiment in it; name an mlruns folder")
        self._runs: dict[str, Path] = {}

    def experiments(self) -> Iterator[ForeignExperiment]:
        for number, path in self._folders.items():
            meta = _meta(path)
            yield ForeignExperiment(
                id=number,
                name=str(meta["name"]),
                lifecycle=_lifecycle(meta, path),
                tags=_values(path / "tags"),
            )

    def runs(self, experiment: str) -> Iterator[ForeignRun]:
        for path in sorted(self._folders[experiment].glob(f"*/{_META}")):
            meta, folder = _meta(path.parent), path.parent
            if "run_id" not in meta and "run_uuid" not in meta:  # a logged model or a trace
                continue
            run_id = str(meta.get("run_id") or meta["run_uuid"])
            self._runs[run_id] = folder
            tags = _values(folder / "tags")
            yield ForeignRun(
                id=run_id,
                name=str(meta.get("run_name") or tags.get("mlflow.runName") or ""),
                user=str(meta.get("user_id") or ""),
                state=MLFLOW_STATES[_STATUS[meta["status"]]] if meta.get("status") in _STATUS else RunState.FAILED,
                lifecycle=_lifecycle(meta, folder),
                started_at=meta.get("start_time") or 0,
                ended_at=meta.get("end_time"),
                artifact_uri=str(meta.get("artifact_uri") or ""),
                files=self._artifacts(folder, str(meta.get("artifact_uri") or ""), run_id),
                params=_values(folder / "params"),
                tags=tags,
                inputs=list(self._inputs(experiment, folder)),
                models=list(_links(folder)),
            )

    def points(self, run: str) -> PointColumns:
        columns = PointColumns()
        folder = self._runs[run] / "metrics"
        for path in _files(folder):
            points = {(at, step, repr(value)) for at, value, step, *_ in _lines(path)}  # a NaN differs from itself
            for at, step, text in sorted(points):
                columns.append(path.relative_to(folder).as_posix(), step, at, float(text))
        return columns

    def logged_models(self, experiment: str) -> Iterator[ForeignLoggedModel]:
        for path in sorted((self._folders[experiment] / "models").glob(f"*/{_META}")):
            meta, folder = _meta(path.parent), path.parent
            model_id = str(meta["model_id"])
            model = LoggedModel(
                pk=0,
                id=model_id,
                experiment_id=experiment,
                name=str(meta["name"]),
                status=_MODEL_STATUS.get(meta["status"], ModelStatus.PENDING),
                lifecycle=_lifecycle(meta, folder),
                owner="",
                created_at=meta["creation_timestamp"],
                updated_at=meta["last_updated_timestamp"],
                artifact_uri=str(meta["artifact_location"]),
                kind=meta.get("model_type"),
                run_id=meta.get("source_run_id"),
                params=_values(folder / "params"),
                tags=_values(folder / "tags"),
                metrics=list(_model_metrics(folder, model_id, meta.get("source_run_id"))),
            )
            yield ForeignLoggedModel(model=model, files=self._artifacts(folder, model.artifact_uri, model_id))

    def registered_models(self) -> Iterator[ForeignModel]:
        for path in sorted(self._registry.glob(f"*/{_META}")):
            meta, folder = _meta(path.parent), path.parent
            versions = [_version(path.parent) for path in folder.glob(f"version-*/{_META}")]
            model = RegisteredModel(
                id=0,
                name=str(meta["name"]),
                owner="",
                created_at=meta.get("creation_timestamp") or 0,
                updated_at=meta.get("last_updated_timestamp") or meta.get("creation_timestamp") or 0,
                description=meta.get("description"),
                tags=_values(folder / "tags"),
                aliases={alias: int(version) for alias, version in _values(folder / "aliases").items()},
            )
            kept = [version for version, is_deleted in versions if not is_deleted]
            yield ForeignModel(
                model=model,
                versions=sorted(kept, key=lambda version: version.version),
                last_number=max((version.version for version, _ in versions), default=0),
            )

    def _artifacts(self, folder: Path, uri: str, owner: str) -> ForeignFiles | None:
        if uri.startswith(PROXY):
            return self._roots.files(uri, owner)
        return partial(folder_files, folder / "artifacts")

    def _inputs(self, experiment: str, folder: Path) -> Iterator[DatasetInput]:
        for path in sorted((folder / "inputs").glob(f"*/{_META}")):
            link = _meta(path.parent)
            if link["source_type"] == "DATASET":
                row = _meta(self._folders[experiment] / "datasets" / Path(str(link["source_id"])).name)
                yield DatasetInput(
                    name=str(row["name"]),
                    digest=str(row["digest"]),
                    source_type=str(row["source_type"]),
                    source=str(row["source"]),
                    schema=row.get("schema"),
                    profile=row.get("profile"),
                    tags={str(key): str(value) for key, value in (link.get("tags") or {}).items()},
                )

    def close(self) -> None:
        """Do nothing: each file is closed once it was read."""


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / _META
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"source={str(path)!r}: cannot be read ({type(error).__name__}); mend the file") from error
    if not isinstance(content, dict):
        raise UsageError(f"source={str(path)!r}: is empty; mend the file")
    return content


def _links(folder: Path) -> Iterator[ModelLink]:
    for path in sorted((folder / "inputs").glob(f"*/{_META}")):
        link = _meta(path.parent)
        if link["source_type"] == "MODEL":
            yield ModelLink(str(link["source_id"]), "input")
    for path in sorted((folder / "outputs").glob(f"*/{_META}")):
        link = _meta(path.parent)
        yield ModelLink(str(link["source_id"]), "output", int(link.get("step") or 0))


def _lines(path: Path) -> Iterator[tuple[Any, ...]]:
    """Yield timestamp, value and step of each point, with what follows them: run, dataset and its digest."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            timestamp, value, *more = line.split(" ")  # the oldest versions wrote no step
            yield int(timestamp), float(value), int(more[0]) if more else 0, *more[1:]
        except ValueError:
            raise UsageError(f"source={str(path)!r}: line {number} is not a point; mend the file") from None


def _model_metrics(folder: Path, model_id: str, maker: str | None) -> Iterator[ModelMetric]:
    for path in _files(folder / "metrics"):
        key = path.relative_to(folder / "metrics").as_posix()
        for at, value, step, *more in _lines(path):
            run_id, *dataset = more or [maker or ""]
            name, digest = (" ".join(dataset[:-1]), dataset[-1]) if dataset else (None, None)
            yield ModelMetric(key, value, at, step, run_id, model_id, name, digest)


def _version(folder: Path) -> tuple[ModelVersion, bool]:
    """Return a version, and whether it was deleted."""
    meta = _meta(folder)
    source = str(meta.get("source") or "")
    version = ModelVersion(
        name=str(meta["name"]),
        version=int(meta["version"]),
        stage=stage_named(meta.get("current_stage")),
        source=source,
        location=str(meta.get("storage_location") or source),
        created_at=meta.get("creation_timestamp") or 0,
        updated_at=meta.get("last_updated_timestamp") or meta.get("creation_timestamp") or 0,
        owner=str(meta.get("user_id") or ""),
        description=meta.get("description"),
        run_id=meta.get("run_id") or None,
        run_link=meta.get("run_link") or None,
        tags=_values(folder / "tags"),
    )
    return version, meta.get("current_stage") == MLFLOW_DELETED_STAGE


def _lifecycle(meta: dict[str, Any], path: Path) -> Lifecycle:
    is_deleted = meta.get("lifecycle_stage") == "deleted" or path.parent.name == _TRASH
    return Lifecycle.DELETED if is_deleted else Lifecycle.ACTIVE


def _values(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in _files(folder)}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
