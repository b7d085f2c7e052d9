"""Requests and answers of MLflow's model registry and logged models. The rules of `wire` hold here too."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from .wire import File, Given, Param, Tag


class Alias(Struct):
    alias: str
    version: str


class MlflowModelVersion(Struct, omit_defaults=True):
    name: str
    version: str
    creation_timestamp: int
    last_updated_timestamp: int
    current_stage: str
    source: str
    status: str
    user_id: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    run_id: str | UnsetType = UNSET
    tags: list[Tag] = []
    run_link: str | UnsetType = UNSET
    aliases: list[str] = []


class MlflowRegisteredModel(Struct, omit_defaults=True):
    name: str
    creation_timestamp: int
    last_updated_timestamp: int
    description: str | UnsetType = UNSET
    latest_versions: list[MlflowModelVersion] = []
    tags: list[Tag] = []
    aliases: list[Alias] = []


class CreateRegisteredModel(Struct):
    name: Given
    tags: list[Tag] | None = None
    description: str | None = None


class RegisteredModelAnswer(Struct):
    registered_model: MlflowRegisteredModel


class ModelName(Struct):
    name: Given


class RenameRegisteredModel(Struct):
    name: Given
    new_name: Given


class UpdateRegisteredModel(Struct):
    name: Given
    description: str | None = None


class SearchRegistry(Struct):
    filter: str | None = None
    max_results: int | None = None
    order_by: list[str] | None = None
    page_token: str | None = None


class RegisteredModelsAnswer(Struct, omit_defaults=True):
    registered_models: list[MlflowRegisteredModel] = []
    next_page_token: str | UnsetType = UNSET


class GetLatestVersions(Struct):
    name: Given
    stages: list[str] | None = None


class ModelVersionsAnswer(Struct, omit_defaults=True):
    model_versions: list[MlflowModelVersion] = []
    next_page_token: str | UnsetType = UNSET


class SetModelTag(Struct):
    name: Given
    key: Given
    value: str | None = ""


class DeleteModelTag(Struct):
    name: Given
    key: Given


class SetAlias(Struct):
    name: Given
    alias: Given
    version: Given


class AliasOfModel(Struct):
    name: Given
    alias: Given


class CreateModelVersion(Struct):
    name: Given
    source: Given
    run_id: str | None = None
    tags: list[Tag] | None = None
    run_link: str | None = None
    description: str | None = None
    model_id: str | None = None


class ModelVersionAnswer(Struct):
    model_version: MlflowModelVersion


class VersionOfModel(Struct):
    name: Given
    version: Given


class UpdateModelVersion(Struct):
    name: Given
    version: Given
    description: str | None = None


class TransitionStage(Struct):
    name: Given
    version: Given
    stage: Given
    archive_existing_versions: bool | None = False


class ArtifactUriAnswer(Struct):
    artifact_uri: str


class SetVersionTag(Struct):
    name: Given
    version: Given
    key: Given
    value: str | None = ""


class DeleteVersionTag(Struct):
    name: Given
    version: Given
    key: Given


class LoggedMetric(Struct, omit_defaults=True):
    key: str
    value: float | str
    timestamp: int
    step: int
    model_id: str
    run_id: str
    dataset_name: str | UnsetType = UNSET
    dataset_digest: str | UnsetType = UNSET


class LoggedModelInfo(Struct, omit_defaults=True):
    model_id: str
    experiment_id: str
    name: str
    creation_timestamp_ms: int
    last_updated_timestamp_ms: int
    artifact_uri: str
    status: str
    model_type: str | UnsetType = UNSET
    source_run_id: str | UnsetType = UNSET
    tags: list[Tag] = []


class LoggedModelData(Struct, omit_defaults=True):
    params: list[Param] = []
    metrics: list[LoggedMetric] = []


class MlflowLoggedModel(Struct):
    info: LoggedModelInfo
    data: LoggedModelData = field(default_factory=LoggedModelData)


class CreateLoggedModel(Struct):
    experiment_id: Given
    name: str | None = None
    model_type: str | None = None
    source_run_id: str | None = None
    params: list[Param] | None = None
    tags: list[Tag] | None = None


class LoggedModelAnswer(Struct):
    model: MlflowLoggedModel


class GetLoggedModel(Struct):
    allow_deleted: bool | None = False


class FinalizeLoggedModel(Struct):
    status: int | str


class LoggedModelTags(Struct):
    tags: list[Tag] | None = None


class LoggedModelParams(Struct):
    params: list[Param] | None = None


class DatasetOfSearch(Struct):
    dataset_name: Given
    dataset_digest: str | None = None


class OrderOfSearch(Struct):
    field_name: Given
    ascending: bool | None = True
    dataset_name: str | None = None
    dataset_digest: str | None = None


class SearchLoggedModels(Struct):
    experiment_ids: list[str]
    filter: str | None = None
    datasets: list[DatasetOfSearch] | None = None
    max_results: int | None = None
    order_by: list[OrderOfSearch] | None = None
    page_token: str | None = None


class LoggedModelsAnswer(Struct, omit_defaults=True):
    models: list[MlflowLoggedModel] = []
    next_page_token: str | UnsetType = UNSET


class ModelDirectory(Struct):
    artifact_directory_path: str | None = None


class ModelFilesAnswer(Struct, omit_defaults=True):
    root_uri: str
    files: list[File] = []
