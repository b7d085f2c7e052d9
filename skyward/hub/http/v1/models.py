"""Handlers of registered models. They only read: clients register by MLflow's routes."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.registry import ModelVersion, RegisteredModel, version_number
from ..routing import Call
from . import model_wire, wire


async def search(call: Call, request: model_wire.ModelSearch) -> model_wire.ModelsOut:
    page = await call.hub.registry.search_models(
        call.actor, request.filter, request.order_by, request.limit, request.page_token
    )
    return model_wire.ModelsOut([_model(model) for model in page.items], page.next_token)


async def get(call: Call, _request: wire.Nothing) -> model_wire.ModelOut:
    return _model(await call.hub.registry.model(call.actor, call.path["name"]))


async def versions(call: Call, request: model_wire.ModelSearch) -> model_wire.ModelVersionsOut:
    model = await call.hub.registry.model(call.actor, call.path["name"])
    page = await call.hub.registry.search_versions(
        call.actor, request.filter, request.order_by, request.limit, request.page_token, model=model.name
    )
    found = [_version(version, _aliases(model, version.version)) for version in page.items]
    return model_wire.ModelVersionsOut(found, page.next_token)


async def get_version(call: Call, _request: wire.Nothing) -> model_wire.ModelVersionOut:
    version = await call.hub.registry.version(call.actor, call.path["name"], version_number(call.path["version"]))
    return _version(version, version.aliases)


def _aliases(model: RegisteredModel, version: int) -> list[str]:
    return [alias for alias, number in model.aliases.items() if number == version]


def _model(value: RegisteredModel) -> model_wire.ModelOut:
    return model_wire.ModelOut(
        name=value.name,
        description=value.description,
        owner=value.owner,
        created_at=value.created_at,
        updated_at=value.updated_at,
        tags=dict(value.tags),
        aliases=dict(value.aliases),
        latest=[_version(version, _aliases(value, version.version)) for version in value.latest],
    )


def _version(value: ModelVersion, aliases: Sequence[str]) -> model_wire.ModelVersionOut:
    return model_wire.ModelVersionOut(
        name=value.name,
        version=value.version,
        stage=value.stage.value,
        source=value.source,
        location=value.location,
        run_id=value.run_id,
        run_link=value.run_link,
        description=value.description,
        owner=value.owner,
        created_at=value.created_at,
        updated_at=value.updated_at,
        tags=dict(value.tags),
        aliases=list(aliases),
    )
