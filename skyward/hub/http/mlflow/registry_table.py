"""Table of MLflow's routes of the model registry and of logged models."""

# One line for each route: wrapped, the table could not be read as one.
# ruff: noqa: E501

from __future__ import annotations

from ...model.access import Right
from ..reply import Empty
from ..routing import Handler, Route
from . import logged_models, registry
from . import registry_wire as wire
from .twins import route

READ, WRITE, MANAGE = Right.READ, Right.WRITE, Right.MANAGE


def of_models(
    method: str, path: str, request: type, answer: type, right: Right, handler: Handler, summary: str
) -> Route:
    """Make a route of the registry."""
    return route(method, f"mlflow/{path}", request, answer, right, "model", handler, summary)


MODEL, VERSION, VERSIONS = wire.RegisteredModelAnswer, wire.ModelVersionAnswer, wire.ModelVersionsAnswer

# fmt: off
REGISTRY = (
    of_models("POST", "registered-models/create", wire.CreateRegisteredModel, MODEL, WRITE, registry.create, "Create a registered model."),
    of_models("GET", "registered-models/get", wire.ModelName, MODEL, READ, registry.get, "Get a registered model."),
    of_models("POST", "registered-models/rename", wire.RenameRegisteredModel, MODEL, WRITE, registry.rename, "Rename a registered model."),
    of_models("PATCH", "registered-models/update", wire.UpdateRegisteredModel, MODEL, WRITE, registry.update, "Set the description of a registered model."),
    of_models("DELETE", "registered-models/delete", wire.ModelName, Empty, WRITE, registry.delete, "Delete a registered model with its versions."),
    of_models("GET", "registered-models/search", wire.SearchRegistry, wire.RegisteredModelsAnswer, READ, registry.search, "Search registered models."),
    of_models("POST", "registered-models/get-latest-versions", wire.GetLatestVersions, VERSIONS, READ, registry.latest_versions, "Get the newest version of each stage."),
    of_models("GET", "registered-models/get-latest-versions", wire.GetLatestVersions, VERSIONS, READ, registry.latest_versions, "Get the newest version of each stage."),
    of_models("POST", "registered-models/set-tag", wire.SetModelTag, Empty, WRITE, registry.set_tag, "Set a tag of a registered model."),
    of_models("DELETE", "registered-models/delete-tag", wire.DeleteModelTag, Empty, WRITE, registry.delete_tag, "Delete a tag of a registered model."),
    of_models("POST", "registered-models/alias", wire.SetAlias, Empty, WRITE, registry.set_alias, "Let an alias name a version."),
    of_models("DELETE", "registered-models/alias", wire.AliasOfModel, Empty, WRITE, registry.delete_alias, "Delete an alias."),
    of_models("GET", "registered-models/alias", wire.AliasOfModel, VERSION, READ, registry.get_by_alias, "Get the version that an alias names."),
    of_models("POST", "model-versions/create", wire.CreateModelVersion, VERSION, WRITE, registry.create_version, "Create a version of a model."),
    of_models("GET", "model-versions/get", wire.VersionOfModel, VERSION, READ, registry.get_version, "Get a version."),
    of_models("PATCH", "model-versions/update", wire.UpdateModelVersion, VERSION, WRITE, registry.update_version, "Set the description of a version."),
    of_models("POST", "model-versions/transition-stage", wire.TransitionStage, VERSION, MANAGE, registry.transition_stage, "Move a version to a stage."),
    of_models("DELETE", "model-versions/delete", wire.VersionOfModel, Empty, WRITE, registry.delete_version, "Delete a version."),
    of_models("GET", "model-versions/get-download-uri", wire.VersionOfModel, wire.ArtifactUriAnswer, READ, registry.download_uri, "Get the URI that clients download."),
    of_models("GET", "model-versions/search", wire.SearchRegistry, VERSIONS, READ, registry.search_versions, "Search versions."),
    of_models("POST", "model-versions/set-tag", wire.SetVersionTag, Empty, WRITE, registry.set_version_tag, "Set a tag of a version."),
    of_models("DELETE", "model-versions/delete-tag", wire.DeleteVersionTag, Empty, WRITE, registry.delete_version_tag, "Delete a tag of a version."),
)

LOGGED, ONE = "logged-models", "logged-models/{model_id}"

LOGGED_MODELS = (
    of_models("POST", LOGGED, wire.CreateLoggedModel, wire.LoggedModelAnswer, WRITE, logged_models.create, "Create a logged model."),
    of_models("POST", f"{LOGGED}/search", wire.SearchLoggedModels, wire.LoggedModelsAnswer, READ, logged_models.search, "Search logged models."),
    of_models("GET", ONE, wire.GetLoggedModel, wire.LoggedModelAnswer, READ, logged_models.get, "Get a logged model."),
    of_models("PATCH", ONE, wire.FinalizeLoggedModel, wire.LoggedModelAnswer, WRITE, logged_models.finalize, "Set the status of a logged model."),
    of_models("DELETE", ONE, Empty, Empty, WRITE, logged_models.delete, "Delete a logged model."),
    of_models("PATCH", f"{ONE}/tags", wire.LoggedModelTags, Empty, WRITE, logged_models.set_tags, "Set tags of a logged model."),
    of_models("DELETE", f"{ONE}/tags/{{key:path}}", Empty, Empty, WRITE, logged_models.delete_tag, "Delete a tag of a logged model."),
    of_models("POST", f"{ONE}/params", wire.LoggedModelParams, Empty, WRITE, logged_models.log_params, "Log parameters of a logged model."),
    of_models("GET", f"{ONE}/artifacts/directories", wire.ModelDirectory, wire.ModelFilesAnswer, READ, logged_models.artifacts, "List artifacts of a logged model."),
)
# fmt: on

ROUTES: tuple[Route, ...] = (*REGISTRY, *LOGGED_MODELS)
