"""Runs of another tracking server, as an import reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .points import PointColumns
from .runs import Lifecycle, RunState

MLFLOW_STATES: Mapping[str, RunState] = {
    "RUNNING": RunState.RUNNING,
    "SCHEDULED": RunState.QUEUED,
    "FINISHED": RunState.COMPLETED,
    "FAILED": RunState.FAILED,
    "KILLED": RunState.CANCELLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignExperiment:
    """An experiment. Times are milliseconds since 1970."""

    id: str
    name: str
    lifecycle: Lifecycle
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRun:
    """A run without its points. `artifacts` is the local folder of its files, None where it is not on this machine."""

    id: str
    name: str
    user: str
    state: RunState
    lifecycle: Lifecycle
    started_at: int
    ended_at: int | None
    artifacts: Path | None
    params: Mapping[str, str]
    tags: Mapping[str, str]


class ForeignRuns(Protocol):
    """A place with experiments and runs that can be read more than once."""

    def experiments(self) -> Iterator[ForeignExperiment]: ...

    def runs(self, experiment: str) -> Iterator[ForeignRun]:
        """Yield the runs of an experiment, those in the bin included."""
        ...

    def points(self, run: str) -> PointColumns:
        """Return all points of a run, each once."""
        ...

    def close(self) -> None: ...


def local_folder(uri: str, root: Path | None) -> Path | None:
    """Return the folder that an artifact URI names on this machine, or None.

    Args:
        uri: Address of a run's artifacts, as MLflow stores it.
        root: Folder of a server that hands out artifacts, for `mlflow-artifacts:` addresses.
    """
    if uri.startswith("mlflow-artifacts:"):
        parts = uri.removeprefix("mlflow-artifacts:").lstrip("/").split("/")
        if root is None or ".." in parts:
            return None
        return root.joinpath(*parts)
    path = Path(uri.removeprefix("file://"))
    return path if path.is_absolute() else None
