"""Translation between MLflow's messages and the hub's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import UNSET

from ...model.points import History, PointColumns
from ...model.product import PREFIX
from ...model.refusal import Reason, Refusal
from ...model.registry import ModelMetric
from ...model.runs import MLFLOW_STATUS, Artifact, DatasetInput, Experiment, ModelLink, Run, RunState
from ..reply import number
from . import wire

LARGEST = 1.7976931348623157e308
INT64 = range(-(2**63), 2**63)

_STATE = {status: state for state, status in MLFLOW_STATUS.items() if state is not RunState.LOST}
# Numbers of the enum in protobuf, which its JSON accepts too.
_STATE_BY_NUMBER = {
    1: RunState.RUNNING,
    2: RunState.QUEUED,
    3: RunState.COMPLETED,
    4: RunState.FAILED,
    5: RunState.CANCELLED,
}
_VIEWS = {
    "ACTIVE_ONLY": "active",
    "DELETED_ONLY": "deleted",
    "ALL": "all",
    "1": "active",
    "2": "deleted",
    "3": "all",
}


def experiment(value: Experiment, workspace: str) -> wire.MlflowExperiment:
    return wire.MlflowExperiment(
        experiment_id=value.id,
        name=value.name,
        artifact_location=value.artifact_location,
        lifecycle_stage=value.lifecycle.value,
        last_update_time=value.updated_at,
        creation_time=value.created_at,
        tags=tags(value.tags),
        workspace=workspace,
    )


def tags(values: Mapping[str, str]) -> list[wire.Tag]:
    return [wire.Tag(key, value) for key, value in values.items()]


def tag_mapping(values: Iterable[wire.Tag] | None) -> dict[str, str]:
    return {tag.key: tag.value or "" for tag in values or ()}


def run_info(value: Run) -> wire.RunInfo:
    return wire.RunInfo(
        run_uuid=value.id,
        run_id=value.id,
        experiment_id=value.experiment_id,
        run_name=value.name,
        user_id=value.user,
        status=MLFLOW_STATUS[value.state],
        start_time=value.started_at,
        end_time=UNSET if value.ended_at is None else value.ended_at,
        artifact_uri=value.artifact_uri,
        lifecycle_stage=value.lifecycle.value,
    )


def run(value: Run) -> wire.MlflowRun:
    shown = dict(value.tags)
    if value.state is RunState.LOST:
        shown[f"{PREFIX}.state"] = "lost"
    outputs = [wire.ModelOutput(link.model_id, link.step) for link in value.models if link.direction == "output"]
    return wire.MlflowRun(
        info=run_info(value),
        data=wire.RunData(
            metrics=[wire.MetricOut(m.key, number(m.value), m.timestamp, m.step) for m in value.metrics],
            params=[wire.Param(key, text) for key, text in value.params.items()],
            tags=tags(shown),
        ),
        inputs=wire.RunInputs(
            dataset_inputs=[dataset_out(dataset) for dataset in value.inputs],
            model_inputs=[wire.ModelInput(link.model_id) for link in value.models if link.direction == "input"],
        ),
        outputs=wire.RunOutputs(outputs),
    )


def state(status: str | int | None) -> RunState | None:
    """Translate the status of a request.

    Raises:
        Refusal: MLflow has no such status.
    """
    if status is None:
        return None
    found = _STATE_BY_NUMBER.get(status) if isinstance(status, int) else _STATE.get(status)
    if found is None:
        raise Refusal(
            Reason.INVALID,
            f"Invalid value {str(status)[:50]!r} for parameter 'status' supplied; choose one of {sorted(_STATE)}",
            field="status",
        )
    return found


def view(value: str | int | None) -> str:
    return _VIEWS["ACTIVE_ONLY" if value is None else str(value)]


def limit(value: int | None, default: int, most: int, name: str = "max_results") -> int:
    """Check the length of a page.

    Raises:
        Refusal: It is not between 1 and `most`.
    """
    if value is None:
        return default
    if not 1 <= value <= most:
        raise Refusal(
            Reason.INVALID, f"Invalid value {value} for parameter '{name}' supplied; choose 1 to {most}", field=name
        )
    return value


def points(metrics: list[wire.MetricIn]) -> PointColumns:
    """Turn the metrics of a request into columns."""
    columns = PointColumns()
    columns.keys = [metric.key for metric in metrics]
    try:
        columns.steps.extend([metric.step or 0 for metric in metrics])
        columns.timestamps.extend([metric.timestamp for metric in metrics])
    except OverflowError:
        raise beyond_int64(metrics) from None
    columns.values.extend([metric.value for metric in metrics])
    return columns


def point(key: str, value: float, timestamp: int, step: int | None) -> PointColumns:
    """Turn one metric into columns."""
    columns = PointColumns()
    try:
        columns.append(key, step or 0, timestamp, value)
    except OverflowError:
        raise Refusal(Reason.INVALID, "step, timestamp: beyond 64 bits; send smaller ones", field="step") from None
    return columns


def model_metrics(run_id: str, metrics: Iterable[wire.MetricIn | wire.LogMetric]) -> list[ModelMetric]:
    """Return the metrics that were measured on logged models."""
    return [
        ModelMetric(
            metric.key,
            metric.value,
            metric.timestamp,
            metric.step or 0,
            run_id,
            metric.model_id,
            metric.dataset_name or None,
            metric.dataset_digest or None,
        )
        for metric in metrics
        if metric.model_id
    ]


def beyond_int64(metrics: list[wire.MetricIn]) -> Refusal:
    for index, metric in enumerate(metrics):
        for name in ("step", "timestamp"):
            if (getattr(metric, name) or 0) not in INT64:
                field = f"metrics[{index}].{name}"
                return Refusal(
                    Reason.INVALID,
                    f"Invalid value {getattr(metric, name)} for parameter '{field}' supplied; it needs 64 bits",
                    field=field,
                )
    raise AssertionError("no number is too large")


def history(value: History) -> list[wire.MetricOut]:
    key = value.key
    return [
        wire.MetricOut(key, amount if amount - amount == 0 else number(amount), timestamp, step)
        for step, timestamp, amount in zip(value.steps, value.timestamps, value.values, strict=True)
    ]


def dataset_in(value: wire.MlflowDatasetInput) -> DatasetInput:
    dataset = value.dataset
    return DatasetInput(
        name=dataset.name,
        digest=dataset.digest,
        source_type=dataset.source_type,
        source=dataset.source,
        schema=dataset.schema or None,
        profile=dataset.profile or None,
        tags=tag_mapping(value.tags),
    )


def dataset_out(value: DatasetInput) -> wire.MlflowDatasetInput:
    return wire.MlflowDatasetInput(
        dataset=wire.MlflowDataset(
            name=value.name,
            digest=value.digest,
            source_type=value.source_type,
            source=value.source,
            schema=UNSET if value.schema is None else value.schema,
            profile=UNSET if value.profile is None else value.profile,
        ),
        tags=tags(value.tags),
    )


def links(models: Iterable[Any], direction: str) -> list[ModelLink]:
    return [ModelLink(model.model_id, direction, getattr(model, "step", 0)) for model in models]


def file(value: Artifact) -> wire.File:
    return wire.File(value.key, value.is_directory, UNSET if value.is_directory else value.size)
