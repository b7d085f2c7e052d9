"""Reader of MLflow's database, of its versions 2 and 3. It looks at the columns that are there and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import MetaData, Table, create_engine, make_url, select
from sqlalchemy.exc import SQLAlchemyError

from ...errors import UsageError
from ..model.foreign import MLFLOW_STATES, ForeignExperiment, ForeignRun, local_folder
from ..model.points import PointColumns
from ..model.runs import Lifecycle, RunState

_TABLES = ("experiments", "experiment_tags", "runs", "params", "tags", "metrics")


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
        self._root, self._workspace = artifact_root, workspace
        try:
            address = make_url(url)
            if address.get_backend_name() == "sqlite" and not Path(str(address.database)).exists():
                raise UsageError(f"source={url!r}: there is no such file; check the path")
            if address.drivername == "postgresql":
                address = address.set(drivername="postgresql+psycopg")
            self._engine = create_engine(address)
            self._connection = self._engine.connect()
            metadata = MetaData()
            metadata.reflect(self._connection, only=lambda name, _: name in _TABLES, resolve_fks=False)
        except (SQLAlchemyError, ImportError) as error:
            problem = type(error).__name__
            raise UsageError(f"source: the database cannot be opened ({problem}); check address and driver") from error
        self._tables: dict[str, Table] = dict(metadata.tables)
        if missing := set(_TABLES) - set(self._tables):
            self.close()
            raise UsageError(f"source: has no table {min(missing)}, so it is not MLflow's; name another database")

    def experiments(self) -> Iterator[ForeignExperiment]:
        table = self._tables["experiments"]
        statement = select(table).order_by(table.c.experiment_id)
        if "workspace" in table.c:
            statement = statement.where(table.c.workspace == self._workspace)
        for row in self._connection.execute(statement).mappings().all():
            number = row["experiment_id"]
            yield ForeignExperiment(
                id=str(number),
                name=row["name"],
                lifecycle=_lifecycle(row),
                tags=self._values("experiment_tags", "experiment_id", number),
            )

    def runs(self, experiment: str) -> Iterator[ForeignRun]:
        table = self._tables["runs"]
        statement = select(table).where(table.c.experiment_id == int(experiment)).order_by(table.c.start_time)
        for row in self._connection.execute(statement).mappings().all():
            tags = self._values("tags", "run_uuid", row["run_uuid"])
            yield ForeignRun(
                id=row["run_uuid"],
                name=row["name"] or tags.get("mlflow.runName") or "",
                user=row["user_id"] or "",
                state=MLFLOW_STATES.get(row["status"], RunState.FAILED),
                lifecycle=_lifecycle(row),
                started_at=row["start_time"] or 0,
                ended_at=row["end_time"],
                artifacts=local_folder(row["artifact_uri"] or "", self._root),
                params=self._values("params", "run_uuid", row["run_uuid"]),
                tags=tags,
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

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    def _values(self, name: str, column: str, owner: Any) -> dict[str, str]:
        table = self._tables[name]
        rows = self._connection.execute(select(table.c.key, table.c.value).where(table.c[column] == owner))
        return {key: value or "" for key, value in rows}


def _lifecycle(row: Any) -> Lifecycle:
    return Lifecycle.DELETED if row["lifecycle_stage"] == "deleted" else Lifecycle.ACTIVE
