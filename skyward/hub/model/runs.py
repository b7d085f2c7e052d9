"""Experiments and runs as the hub's services hand them out. Times are milliseconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .names import check_text
from .refusal import Reason, Refusal


class RunState(StrEnum):
    """State of a run. MLflow's API spells the first five in its own way, see `MLFLOW_STATUS`."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Running, but its heartbeat is overdue. It is running again when it is heard again."""

    @property
    def is_final(self) -> bool:
        return self in {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED}


MLFLOW_STATUS: Mapping[RunState, str] = {
    RunState.QUEUED: "SCHEDULED",
    RunState.RUNNING: "RUNNING",
    RunState.COMPLETED: "FINISHED",
    RunState.FAILED: "FAILED",
    RunState.CANCELLED: "KILLED",
    RunState.LOST: "RUNNING",
}


class Lifecycle(StrEnum):
    """Place of a thing: listed, or in the bin, from where it can be restored."""

    ACTIVE = "active"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A named group of runs within a project."""

    id: str
    name: str
    artifact_location: str
    lifecycle: Lifecycle
    created_at: int
    updated_at: int
    owner: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LatestMetric:
    """Last value of a metric: the point that is greatest by (step, timestamp, value)."""

    key: str
    value: float
    step: int
    timestamp: int


@dataclass(frozen=True, slots=True)
class DatasetInput:
    """A dataset that a run used, as MLflow's `log_input` describes it."""

    name: str
    digest: str
    source_type: str
    source: str
    schema: str | None = None
    profile: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


_DATASET_LENGTHS = {
    "name": 500, "digest": 128, "source_type": 500, "source": 65_535, "schema": 1_048_575, "profile": 16_777_215,
}  # fmt: skip
"""Limits of MLflow in characters, but longer digests: SHA-256 has 64."""
_DATASET_TAG_LENGTHS = {"key": 255, "value": 500}


def check_dataset(dataset: DatasetInput) -> DatasetInput:
    """Check the texts of a dataset, and return it.

    Raises:
        Refusal: One is too long, or no text.
    """
    for field_name, most in _DATASET_LENGTHS.items():
        _check_length(f"dataset.{field_name}", getattr(dataset, field_name) or "", most)
    for key, value in dataset.tags.items():
        _check_length("tags.key", key, _DATASET_TAG_LENGTHS["key"])
        _check_length("tags.value", value, _DATASET_TAG_LENGTHS["value"])
    return dataset


def _check_length(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise Refusal(
            Reason.INVALID, f"{name}={text[:77]!r}: has {len(text)} characters; use at most {most}", field=name
        )
    check_text(name, text)


@dataclass(frozen=True, slots=True)
class ModelLink:
    """A logged model that a run read (`input`) or made (`output`)."""

    model_id: str
    direction: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A run with its parameters, tags and latest metrics. Histories of metrics are read apart."""

    id: str
    experiment_id: str
    name: str
    state: RunState
    lifecycle: Lifecycle
    user: str
    started_at: int
    ended_at: int | None
    artifact_uri: str
    heartbeat_at: int | None = None
    """Time of the last heartbeat. None for clients that send none, which are never lost."""
    error: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[LatestMetric] = ()
    inputs: Sequence[DatasetInput] = ()
    models: Sequence[ModelLink] = ()


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of a run: its key (a relative path with forward slashes), size in bytes and SHA-256 in hexadecimal."""

    key: str
    size: int
    sha256: str
    is_directory: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """An order to a running training (`save`, `stop` or `abort`), which its sender collects."""

    number: int
    action: str
    created_at: int
    acknowledged_at: int | None = None
    result: str | None = None
