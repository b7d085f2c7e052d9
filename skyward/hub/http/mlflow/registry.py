"""Handlers of MLflow's registered models and their versions."""

from __future__ import annotations

from msgspec import UNSET

from ...model.registry import ModelVersion, RegisteredModel, stage_of, version_number
from ..reply import Empty
from ..routing import Call
from . import registry_wire as wire
from . import values

MOST_MODELS, MOST_VERSIONS = 1_000, 200_000
PAGE_OF_VERSIONS = 10_000
LONGEST_PAGE = 50_000
"""Versions on a page at most. MLflow allows `MOST_VERSIONS`; a shorter page with a token is legal."""


def version_out(value: ModelVersion) -> wire.MlflowModelVersion:
    return wire.MlflowModelVersion(
        name=value.name,
        version=str(value.version),
        creation_timestamp=value.created_at,
        last_updated_timestamp=value.updated_at,
        current_stage=value.stage.shown,
        source=value.source,
        status="READY",
        description=UNSET if value.description is None else value.description,
        run_id=UNSET if value.run_id is None else value.run_id,
        tags=values.tags(value.tags),
        run_link=UNSET if value.run_link is None else value.run_link,
        aliases=list(value.aliases),
    )


def model_out(value: RegisteredModel) -> wire.MlflowRegisteredModel:
    return wire.MlflowRegisteredModel(
        name=value.name,
        creation_timestamp=value.created_at,
        last_updated_timestamp=value.updated_at,
        description=value.description or UNSET,
        latest_versions=[version_out(version) for version in value.latest],
        tags=values.tags(value.tags),
        aliases=[wire.Alias(alias, str(version)) for alias, version in value.aliases.items()],
    )


async def create(call: Call, request: wire.CreateRegisteredModel) -> wire.RegisteredModelAnswer:
    tags = values.tag_mapping(request.tags)
    model = await call.hub.registry.create_model(call.actor, request.name, tags, request.description)
    return wire.RegisteredModelAnswer(model_out(model))


async def get(call: Call, request: wire.ModelName) -> wire.RegisteredModelAnswer:
    return wire.RegisteredModelAnswer(model_out(await call.hub.registry.model(call.actor, request.name)))


async def rename(call: Call, request: wire.RenameRegisteredModel) -> wire.RegisteredModelAnswer:
    model = await call.hub.registry.rename_model(call.actor, request.name, request.new_name)
    return wire.RegisteredModelAnswer(model_out(model))


async def update(call: Call, request: wire.UpdateRegisteredModel) -> wire.RegisteredModelAnswer:
    model = await call.hub.registry.update_model(call.actor, request.name, request.description)
    return wire.RegisteredModelAnswer(model_out(model))


async def delete(call: Call, request: wire.ModelName) -> Empty:
    await call.hub.registry.delete_model(call.actor, request.name)
    return Empty()


async def search(call: Call, request: wire.SearchRegistry) -> wire.RegisteredModelsAnswer:
    page = await call.hub.registry.search_models(
        call.actor,
        request.filter,
        request.order_by or [],
        values.limit(request.max_results, 100, MOST_MODELS),
        request.page_token or None,
    )
    return wire.RegisteredModelsAnswer([model_out(model) for model in page.items], page.next_token or UNSET)


async def latest_versions(call: Call, request: wire.GetLatestVersions) -> wire.ModelVersionsAnswer:
    stages = [stage_of(stage) for stage in request.stages or []]
    versions = await call.hub.registry.latest_versions(call.actor, request.name, stages)
    return wire.ModelVersionsAnswer([version_out(version) for version in versions])


async def set_tag(call: Call, request: wire.SetModelTag) -> Empty:
    await call.hub.registry.set_model_tag(call.actor, request.name, request.key, request.value or "")
    return Empty()


async def delete_tag(call: Call, request: wire.DeleteModelTag) -> Empty:
    await call.hub.registry.delete_model_tag(call.actor, request.name, request.key)
    return Empty()


async def set_alias(call: Call, request: wire.SetAlias) -> Empty:
    await call.hub.registry.set_alias(call.actor, request.name, request.alias, version_number(request.version))
    return Empty()


async def delete_alias(call: Call, request: wire.AliasOfModel) -> Empty:
    await call.hub.registry.delete_alias(call.actor, request.name, request.alias)
    return Empty()


async def get_by_alias(call: Call, request: wire.AliasOfModel) -> wire.ModelVersionAnswer:
    version = await call.hub.registry.version_by_alias(call.actor, request.name, request.alias)
    return wire.ModelVersionAnswer(version_out(version))


async def create_version(call: Call, request: wire.CreateModelVersion) -> wire.ModelVersionAnswer:
    version = await call.hub.registry.create_version(
        call.actor,
        request.name,
        request.source,
        run_id=request.run_id or "",
        model_id=request.model_id or "",
        tags=values.tag_mapping(request.tags),
        description=request.description or "",
        run_link=request.run_link or "",
    )
    return wire.ModelVersionAnswer(version_out(version))


async def get_version(call: Call, request: wire.VersionOfModel) -> wire.ModelVersionAnswer:
    version = await call.hub.registry.version(call.actor, request.name, version_number(request.version))
    return wire.ModelVersionAnswer(version_out(version))


async def update_version(call: Call, request: wire.UpdateModelVersion) -> wire.ModelVersionAnswer:
    version = await call.hub.registry.update_version(
        call.actor, request.name, version_number(request.version), request.description
    )
    return wire.ModelVersionAnswer(version_out(version))


async def transition_stage(call: Call, request: wire.TransitionStage) -> wire.ModelVersionAnswer:
    version = await call.hub.registry.move_version(
        call.actor,
        request.name,
        version_number(request.version),
        stage_of(request.stage),
        archives_others=bool(request.archive_existing_versions),
    )
    return wire.ModelVersionAnswer(version_out(version))


async def delete_version(call: Call, request: wire.VersionOfModel) -> Empty:
    await call.hub.registry.delete_version(call.actor, request.name, version_number(request.version))
    return Empty()


async def download_uri(call: Call, request: wire.VersionOfModel) -> wire.ArtifactUriAnswer:
    version = await call.hub.registry.version(call.actor, request.name, version_number(request.version))
    return wire.ArtifactUriAnswer(version.location)


async def search_versions(call: Call, request: wire.SearchRegistry) -> wire.ModelVersionsAnswer:
    limit = values.limit(request.max_results, PAGE_OF_VERSIONS, MOST_VERSIONS)
    page = await call.hub.registry.search_versions(
        call.actor, request.filter, request.order_by or [], min(limit, LONGEST_PAGE), request.page_token or None
    )
    return wire.ModelVersionsAnswer([version_out(version) for version in page.items], page.next_token or UNSET)


async def set_version_tag(call: Call, request: wire.SetVersionTag) -> Empty:
    version = version_number(request.version)
    await call.hub.registry.set_version_tag(call.actor, request.name, version, request.key, request.value or "")
    return Empty()


async def delete_version_tag(call: Call, request: wire.DeleteVersionTag) -> Empty:
    version = version_number(request.version)
    await call.hub.registry.delete_version_tag(call.actor, request.name, version, request.key)
    return Empty()
