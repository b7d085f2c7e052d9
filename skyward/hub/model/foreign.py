"""Runs and models of another tracking server, as an import reads them, and the outcome of an import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .points import PointColumns
from .registry import LoggedModel, ModelStatus, ModelVersion, RegisteredModel, Stage
from .runs import DatasetInput, Lifecycle, ModelLink, RunState

MLFLOW_STATES: Mapping[str, RunState] = {
    "RUNNING": RunState.RUNNING,
    "SCHEDULED": RunState.QUEUED,
    "FINISHED": RunState.COMPLETED,
    "FAILED": RunState.FAILED,
    "KILLED": RunState.CANCELLED,
}
MLFLOW_MODEL_STATUS: Mapping[str, ModelStatus] = {
    "LOGGED_MODEL_PENDING": ModelStatus.PENDING,
    "LOGGED_MODEL_READY": ModelStatus.READY,
    "LOGGED_MODEL_UPLOAD_FAILED": ModelStatus.FAILED,
}
MLFLOW_DELETED_STAGE = "Deleted_Internal"
"""Stage of a version that was deleted. Its row reserves its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignExperiment:
    """An experiment. Times are milliseconds since 1970."""

    id: str
    name: str
    lifecycle: Lifecycle
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of a run or of a logged model.

    Attributes:
        key: Relative path, as its server spells it. It is checked before use.
        size: Number of bytes. None where the server does not tell it.
        read: Open the file and yield its bytes. It raises `Refusal` where the file cannot be read.
    """

    key: str
    size: int | None
    read: Callable[[], Iterator[bytes]]


ForeignFiles = Callable[[], Iterator[ForeignFile]]
"""List files. The call raises `Refusal` where they cannot be listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRun:
    """A run without its points.

    Attributes:
        artifact_uri: Address of its files in the source.
        files: Its files. None where this machine cannot reach them.
    """

    id: str
    name: str
    user: str
    state: RunState
    lifecycle: Lifecycle
    started_at: int
    ended_at: int | None
    artifact_uri: str
    files: ForeignFiles | None
    params: Mapping[str, str]
    tags: Mapping[str, str]
    inputs: Sequence[DatasetInput] = ()
    models: Sequence[ModelLink] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLoggedModel:
    """A logged model whose ids and artifact URI are those of the source. `files` is as that of a run."""

    model: LoggedModel
    files: ForeignFiles | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignModel:
    """A registered model.

    Attributes:
        model: The model with its tags and aliases.
        versions: Versions that are not deleted. Their `location` is the storage location of MLflow.
        last_number: Greatest number of a version, deleted ones included.
    """

    model: RegisteredModel
    versions: Sequence[ModelVersion]
    last_number: int


class ForeignRuns(Protocol):
    """A place with experiments, runs and models that can be read more than once."""

    def experiments(self) -> Iterator[ForeignExperiment]: ...

    def runs(self, experiment: str) -> Iterator[ForeignRun]:
        """Yield the runs of an experiment, those in the bin included."""
        ...

    def points(self, run: str) -> PointColumns:
        """Return all points of a run, each once."""
        ...

    def logged_models(self, experiment: str) -> Iterator[ForeignLoggedModel]:
        """Yield the logged models of an experiment."""
        ...

    def registered_models(self) -> Iterator[ForeignModel]:
        """Yield all registered models, prompts included."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Imported:
    """Outcome of an import.

    Attributes:
        source: Number of things in the source, by kind.
        hub: Number of the same things in the hub afterwards.
        problems: Differences and things that could not be imported, in words.
    """

    source: Counter[str] = field(default_factory=Counter)
    hub: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.source == self.hub and not self.problems


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


def stage_named(name: str | None) -> Stage:
    """Return the stage that MLflow calls so. Unknown ones are none."""
    spelled = (name or "").lower()
    return Stage(spelled) if spelled in tuple(Stage) else Stage.NONE
