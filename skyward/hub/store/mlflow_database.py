"""Reader of MLflow's database, of its versions 2 and 3. It looks at the columns that are there and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from sqlalchemy import MetaData, Table, create_engine, make_url, select
from sqlalchemy.exc import SQLAlchemyError

from ...errors import UsageError
from ..model.foreign import (
    MLFLOW_DELETED_STAGE,
    MLFLOW_STATES,
    ForeignExperiment,
    ForeignLoggedModel,
    ForeignModel,
    ForeignRun,
    stage_named,
)
from ..model.points import PointColumns
from ..model.registry import LoggedModel, ModelMetric, ModelStatus, ModelVersion, RegisteredModel
from ..model.runs import DatasetInput, Lifecycle, ModelLink, RunState
from .mlflow_files import ArtifactRoots

_TABLES = ("experiments", "experiment_tags", "runs", "params", "tags", "metrics")
_LATER_TABLES = (  # which versions before 2.4 or before 3.0 lack
    "datasets", "inputs", "input_tags",
    "registered_models", "registered_model_tags", "registered_model_aliases", "model_versions", "model_version_tags",
    "logged_models", "logged_model_params", "logged_model_tags", "logged_model_metrics",
)  # fmt: skip
_MODEL_STATUS = {1: ModelStatus.PENDING, 2: ModelStatus.READY, 3: ModelStatus.FAILED}
_DIRECTIONS = {"MODEL_INPUT": "input", "MODEL_OUTPUT": "output"}


class MlflowDatabase:
    """An MLflow database.

    Args:
        url: SQLAlchemy's address, such as `sqlite:////absolute/mlflow.db`.
        artifact_root: Folder in place of `mlflow-artifacts:/`, see `local_folder`.
        workspace: Workspace to be read, where the database has several.

    Raises:
        UsageError: It cannot be read, or is not MLflow's.
    """

    def __init__(self, url: str, artifact_root: Path | None = None, workspace: str = "default") -> None:
        self._roots, self._workspace = ArtifactRoots(artifact_root), workspace
        try:
            address = make_url(url)
            if address.get_backend_name() == "sqlite" and not Path(str(address.database)).exists():
                raise UsageError(f"source={url!r}: there is no such file; check the path")
            if address.drivername == "postgresql":
                address = address.set(drivername="postgresql+psycopg")
            self._engine = create_engine(address)
            self._connection = self._engine.connect()
            metadata = MetaData()
            metadata.reflect(self._connection, only=lambda name, _: name in _TABLES + _LATER_TABLES, resolve_fks=False)
        except (SQLAlchemyError, ImportError) as error:
            problem = type(error).__name__
            raise UsageError(f"source: the database cannot be opened ({problem}); check address and driver") from error
        self._tables: dict[str, Table] = dict(metadata.tables)
        if missing := set(_TABLES) - set(self._tables):
            self.close()
            raise UsageError(f"source: has no table {min(missing)}, so it is not MLflow's; name another database")

    def experiments(self) -> Iterator[ForeignExperiment]:
        for row in sorted(self._of_workspace("experiments"), key=itemgetter("experiment_id")):
            number = row["experiment_id"]
            yield ForeignExperiment(
                id=str(number),
                name=row["name"],
                lifecycle=_lifecycle(row),
                tags=self._values("experiment_tags", experiment_id=number),
            )

    def runs(self, experiment: str) -> Iterator[ForeignRun]:
        rows = self._rows("runs", experiment_id=int(experiment))
        for row in sorted(rows, key=lambda row: (row["start_time"] or 0, row["run_uuid"])):
            run_id = row["run_uuid"]
            tags = self._values("tags", run_uuid=run_id)
            yield ForeignRun(
                id=run_id,
                name=row["name"] or tags.get("mlflow.runName") or "",
                user=row["user_id"] or "",
                state=MLFLOW_STATES.get(row["status"], RunState.FAILED),
                lifecycle=_lifecycle(row),
                started_at=row["start_time"] or 0,
                ended_at=row["end_time"],
                artifact_uri=row["artifact_uri"] or "",
                files=self._roots.files(row["artifact_uri"] or "", run_id),
                params=self._values("params", run_uuid=run_id),
                tags=tags,
                inputs=list(self._inputs(run_id)),
                models=list(self._links(run_id)),
            )

    def points(self, run: str) -> PointColumns:
        table = self._tables["metrics"]
        columns = PointColumns()
        statement = select(table.c.key, table.c.step, table.c.timestamp, table.c.value, table.c.is_nan)
        order = (table.c.key, table.c.timestamp, table.c.step, table.c.value)
        rows = self._connection.execute(statement.where(table.c.run_uuid == run).order_by(*order))
        for key, step, timestamp, value, is_nan in rows:
            columns.append(key, step, timestamp, math.nan if is_nan else value)
        return columns

    def logged_models(self, experiment: str) -> Iterator[ForeignLoggedModel]:
        rows = self._rows("logged_models", experiment_id=int(experiment))
        for row in sorted(rows, key=itemgetter("creation_timestamp_ms", "model_id")):
            model_id = row["model_id"]
            model = LoggedModel(
                pk=0,
                id=model_id,
                experiment_id=experiment,
                name=row["name"],
                status=_MODEL_STATUS.get(row["status"], ModelStatus.PENDING),
                lifecycle=_lifecycle(row),
                owner="",
                created_at=row["creation_timestamp_ms"],
                updated_at=row["last_updated_timestamp_ms"],
                artifact_uri=row["artifact_location"],
                kind=row["model_type"],
                run_id=row["source_run_id"],
                params=self._values("logged_model_params", "param_", model_id=model_id),
                tags=self._values("logged_model_tags", "tag_", model_id=model_id),
                metrics=list(self._model_metrics(model_id)),
            )
            yield ForeignLoggedModel(model=model, files=self._roots.files(model.artifact_uri, model_id))

    def registered_models(self) -> Iterator[ForeignModel]:
        for row in sorted(self._of_workspace("registered_models"), key=itemgetter("name")):
            name = row["name"]
            model = RegisteredModel(
                id=0,
                name=name,
                owner="",
                created_at=row["creation_time"] or 0,
                updated_at=row["last_updated_time"] or row["creation_time"] or 0,
                description=row["description"],
                tags=_pairs(self._of_workspace("registered_model_tags", name=name)),
                aliases={
                    alias["alias"]: alias["version"]
                    for alias in self._of_workspace("registered_model_aliases", name=name)
                },
            )
            versions = sorted(self._of_workspace("model_versions", name=name), key=itemgetter("version"))
            yield ForeignModel(
                model=model,
                versions=[
                    self._version(version) for version in versions if version["current_stage"] != MLFLOW_DELETED_STAGE
                ],
                last_number=max((version["version"] for version in versions), default=0),
            )

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    def _inputs(self, run_id: str) -> Iterator[DatasetInput]:
        for link in self._rows("inputs", source_type="DATASET", destination_type="RUN", destination_id=run_id):
            for row in self._rows("datasets", dataset_uuid=link["source_id"]):
                tags = {tag["name"]: tag["value"] for tag in self._rows("input_tags", input_uuid=link["input_uuid"])}
                yield DatasetInput(
                    name=row["name"],
                    digest=row["digest"],
                    source_type=row["dataset_source_type"],
                    source=row["dataset_source"],
                    schema=row["dataset_schema"],
                    profile=row["dataset_profile"],
                    tags=tags,
                )

    def _links(self, run_id: str) -> Iterator[ModelLink]:
        for source_type in ("RUN_INPUT", "RUN_OUTPUT"):
            for link in self._rows("inputs", source_type=source_type, source_id=run_id):
                if direction := _DIRECTIONS.get(link["destination_type"]):
                    yield ModelLink(link["destination_id"], direction, link.get("step") or 0)

    def _model_metrics(self, model_id: str) -> Iterator[ModelMetric]:
        for row in self._rows("logged_model_metrics", model_id=model_id):
            yield ModelMetric(
                key=row["metric_name"],
                value=math.nan if row["metric_value"] is None else row["metric_value"],
                timestamp=row["metric_timestamp_ms"],
                step=row["metric_step"],
                run_id=row["run_id"],
                model_id=model_id,
                dataset_name=row["dataset_name"],
                dataset_digest=row["dataset_digest"],
            )

    def _version(self, row: Mapping[str, Any]) -> ModelVersion:
        source = row["source"] or ""
        return ModelVersion(
            name=row["name"],
            version=row["version"],
            stage=stage_named(row["current_stage"]),
            source=source,
            location=row.get("storage_location") or source,
            created_at=row["creation_time"] or 0,
            updated_at=row["last_updated_time"] or row["creation_time"] or 0,
            owner=row["user_id"] or "",
            description=row["description"],
            run_id=row["run_id"] or None,
            run_link=row["run_link"] or None,
            tags=_pairs(self._of_workspace("model_version_tags", name=row["name"], version=row["version"])),
        )

    def _of_workspace(self, name: str, /, **values: object) -> list[Mapping[str, Any]]:
        table = self._tables.get(name)
        if table is not None and "workspace" in table.c:
            values["workspace"] = self._workspace
        return self._rows(name, **values)

    def _rows(self, name: str, /, **values: object) -> list[Mapping[str, Any]]:
        """Return the rows with these values. A table that this version of MLflow lacks has none."""
        table = self._tables.get(name)
        if table is None:
            return []
        statement = select(table).where(*(table.c[column] == value for column, value in values.items()))
        return [dict(row) for row in self._connection.execute(statement).mappings()]

    def _values(self, name: str, prefix: str = "", /, **values: object) -> dict[str, str]:
        return _pairs(self._rows(name, **values), prefix)


def _pairs(rows: list[Mapping[str, Any]], prefix: str = "") -> dict[str, str]:
    return {row[f"{prefix}key"]: row[f"{prefix}value"] or "" for row in rows}


def _lifecycle(row: Mapping[str, Any]) -> Lifecycle:
    return Lifecycle.DELETED if row["lifecycle_stage"] == "deleted" else Lifecycle.ACTIVE
