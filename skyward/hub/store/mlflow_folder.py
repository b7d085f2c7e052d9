"""Reader of an `mlruns` folder, as MLflow's file store wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from ...errors import UsageError
from ..model.foreign import MLFLOW_STATES, ForeignExperiment, ForeignRun
from ..model.points import PointColumns
from ..model.runs import Lifecycle, RunState

_STATUS = {1: "RUNNING", 2: "SCHEDULED", 3: "FINISHED", 4: "FAILED", 5: "KILLED"}
_META = "meta.yaml"
_TRASH = ".trash"


class MlflowFolder:
    """An `mlruns` folder. Files of a run are read beside its metrics, wherever the folder was copied to.

    Args:
        folder: The folder.

    Raises:
        UsageError: There is no experiment in it.
    """

    def __init__(self, folder: Path) -> None:
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
                artifacts=folder / "artifacts",
                params=_values(folder / "params"),
                tags=tags,
            )

    def points(self, run: str) -> PointColumns:
        columns = PointColumns()
        folder = self._runs[run] / "metrics"
        for path in _files(folder):
            key = path.relative_to(folder).as_posix()
            points = set()
            for number, line in enumerate(path.read_text().splitlines(), 1):
                try:
                    timestamp, value, step = (*line.split(" "), "0")[:3]  # the oldest versions wrote no step
                    points.add((int(timestamp), int(step), value))
                except ValueError:
                    raise UsageError(f"source={str(path)!r}: line {number} is not a point; mend the file") from None
            for at, step_number, text in sorted(points):
                columns.append(key, step_number, at, float(text))
        return columns

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


def _lifecycle(meta: dict[str, Any], path: Path) -> Lifecycle:
    is_deleted = meta.get("lifecycle_stage") == "deleted" or path.parent.name == _TRASH
    return Lifecycle.DELETED if is_deleted else Lifecycle.ACTIVE


def _values(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in _files(folder)}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
