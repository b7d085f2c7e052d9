"""Requests and answers of MLflow's tracking API.

Field names, defaults and the omission of empty fields follow MLflow's protobuf messages in their JSON form. Unknown
fields are ignored, and integers may come as strings, as in protobuf's JSON.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

Given = Annotated[str, Meta(min_length=1)]
"""A required string: MLflow takes an empty one for a missing one."""

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

View = Annotated[str, Meta(pattern="^(ACTIVE_ONLY|DELETED_ONLY|ALL|1|2|3)$")] | Literal[1, 2, 3] | None


class Tag(Struct):
    key: Given
    value: str | None = ""


class Param(Struct):
    key: Given
    value: str | None = ""


class MetricIn(Struct):
    key: Given
    value: float
    timestamp: int
    step: int | None = 0
    model_id: str | None = None
    dataset_name: str | None = None
    dataset_digest: str | None = None


class MetricOut(Struct):
    key: str
    value: float | str
    timestamp: int
    step: int


class MetricOfRun(Struct):
    key: str
    value: float | str
    timestamp: int
    step: int
    run_id: str


class MlflowExperiment(Struct, omit_defaults=True):
    experiment_id: str
    name: str
    artifact_location: str
    lifecycle_stage: str
    last_update_time: int
    creation_time: int
    tags: list[Tag] = []
    workspace: str = ""


class RunInfo(Struct, omit_defaults=True):
    run_uuid: str
    experiment_id: str
    run_name: str
    user_id: str
    status: str
    start_time: int
    artifact_uri: str
    lifecycle_stage: str
    run_id: str
    end_time: int | UnsetType = UNSET


class RunData(Struct, omit_defaults=True):
    metrics: list[MetricOut] = []
    params: list[Param] = []
    tags: list[Tag] = []


class MlflowDataset(Struct, omit_defaults=True):
    name: Given
    digest: Given
    source_type: Given
    source: Given
    schema: str | UnsetType | None = UNSET
    profile: str | UnsetType | None = UNSET


class MlflowDatasetInput(Struct, omit_defaults=True):
    dataset: MlflowDataset
    tags: list[Tag] = []


class ModelInput(Struct):
    model_id: Given


class ModelOutput(Struct):
    model_id: Given
    step: int = 0


class RunInputs(Struct, omit_defaults=True):
    dataset_inputs: list[MlflowDatasetInput] = []
    model_inputs: list[ModelInput] = []


class RunOutputs(Struct, omit_defaults=True):
    model_outputs: list[ModelOutput] = []


class MlflowRun(Struct, omit_defaults=True):
    info: RunInfo
    data: RunData
    inputs: RunInputs = field(default_factory=RunInputs)
    outputs: RunOutputs | UnsetType = UNSET


class File(Struct):
    path: str
    is_dir: bool
    file_size: int | UnsetType = UNSET


class CreateExperiment(Struct):
    name: Given
    artifact_location: str | None = None
    tags: list[Tag] | None = None


class ExperimentId(Struct):
    experiment_id: Given


class ExperimentCreated(Struct):
    experiment_id: str


class ExperimentNamed(Struct):
    experiment_name: Given


class ExperimentAnswer(Struct):
    experiment: MlflowExperiment


class UpdateExperiment(Struct):
    experiment_id: Given
    new_name: Given


class SearchExperiments(Struct):
    max_results: int | None = None
    page_token: str | None = None
    filter: str | None = None
    order_by: list[str] | None = None
    view_type: View = None


class ExperimentsAnswer(Struct, omit_defaults=True):
    experiments: list[MlflowExperiment] = []
    next_page_token: str | UnsetType = UNSET


class SetExperimentTag(Struct):
    experiment_id: Given
    key: Given
    value: str | None = ""


class DeleteExperimentTag(Struct):
    experiment_id: Given
    key: Given


class CreateRun(Struct):
    experiment_id: str | None = None
    user_id: str | None = None
    run_name: str | None = None
    start_time: Int64 | None = None
    tags: list[Tag] | None = None


class RunAnswer(Struct):
    run: MlflowRun


class RunId(Struct):
    run_id: Given


class GetRun(Struct):
    run_id: str = ""
    run_uuid: str = ""  # its name before MLflow 1.0


class UpdateRun(Struct):
    run_id: Given
    status: str | int | None = None
    end_time: Int64 | None = None
    run_name: str | None = None


class RunInfoAnswer(Struct):
    run_info: RunInfo


class LogMetric(Struct):
    run_id: Given
    key: Given
    value: float
    timestamp: int
    step: int | None = 0
    model_id: str | None = None
    dataset_name: str | None = None
    dataset_digest: str | None = None


class LogParam(Struct):
    run_id: Given
    key: Given
    value: str | None = ""


class SetTag(Struct):
    run_id: Given
    key: Given
    value: str | None = ""


class DeleteTag(Struct):
    run_id: Given
    key: Given


class LogBatch(Struct):
    run_id: Given
    metrics: list[MetricIn] | None = None
    params: list[Param] | None = None
    tags: list[Tag] | None = None


class LogModel(Struct):
    run_id: Given
    model_json: Given


class LogInputs(Struct):
    run_id: Given
    datasets: list[MlflowDatasetInput] | None = None
    models: list[ModelInput] | None = None


class LogOutputs(Struct):
    run_id: Given
    models: list[ModelOutput]


class SearchRuns(Struct):
    experiment_ids: list[str] | None = None
    filter: str | None = None
    run_view_type: View = None
    max_results: int | None = None
    order_by: list[str] | None = None
    page_token: str | None = None


class RunsAnswer(Struct, omit_defaults=True):
    runs: list[MlflowRun] = []
    next_page_token: str | UnsetType = UNSET


class GetHistory(Struct):
    run_id: Given
    metric_key: Given
    page_token: str | None = None
    max_results: int | None = None


class HistoryAnswer(Struct, omit_defaults=True):
    metrics: list[MetricOut] = []
    next_page_token: str | UnsetType = UNSET


class GetHistoryBulk(Struct):
    run_id: list[str]
    metric_key: Given
    max_results: int | None = None


class GetHistoryBulkInterval(Struct):
    run_ids: list[str]
    metric_key: Given
    start_step: Int64 | None = None
    end_step: Int64 | None = None
    max_results: int | None = None


class HistoryOfRunsAnswer(Struct, omit_defaults=True):
    metrics: list[MetricOfRun] = []


class ListArtifacts(Struct):
    run_id: Given
    path: str | None = None
    page_token: str | None = None


class FilesAnswer(Struct, omit_defaults=True):
    root_uri: str | UnsetType = UNSET
    files: list[File] = []
    next_page_token: str | UnsetType = UNSET


class ArtifactPath(Struct):
    path: str | None = None


class ServerInfo(Struct):
    store_type: str
    workspaces_enabled: bool
    trace_archival_enabled: bool
    multipart_uploads_enabled: bool
    multipart_downloads_enabled: bool
    presigned_upload_run_id_supported: bool
    presigned_upload_model_id_supported: bool
    features_enabled: dict[str, bool]


class Workspace(Struct):
    name: str
    description: str | UnsetType = UNSET


class NewWorkspace(Struct):
    name: str
    description: str | UnsetType = UNSET
    default_artifact_root: str | UnsetType = UNSET


class WorkspaceUpdate(Struct):
    description: str | UnsetType = UNSET
    default_artifact_root: str | UnsetType = UNSET


class WorkspaceDeletion(Struct):
    mode: str = "RESTRICT"


class WorkspacesAnswer(Struct):
    workspaces: list[Workspace]


class WorkspaceAnswer(Struct):
    workspace: Workspace


class ArtifactOfRun(Struct):
    path: Given
    run_uuid: str = ""
    run_id: str = ""
