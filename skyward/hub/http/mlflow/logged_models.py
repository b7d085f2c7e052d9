"""Handlers of MLflow's logged models."""

from __future__ import annotations

from msgspec import UNSET

from ...model.refusal import Reason, Refusal
from ...model.registry import LoggedModel, ModelStatus
from ...services.artifacts import MODELS
from ..reply import Empty, number
from ..routing import Call
from . import registry_wire as wire
from . import values
from .wire import Param

PAGE, LONGEST_PAGE = 100, 50_000

_STATUS = {
    "LOGGED_MODEL_PENDING": ModelStatus.PENDING,
    "LOGGED_MODEL_READY": ModelStatus.READY,
    "LOGGED_MODEL_UPLOAD_FAILED": ModelStatus.FAILED,
    "1": ModelStatus.PENDING,
    "2": ModelStatus.READY,
    "3": ModelStatus.FAILED,
}
_SHOWN = {
    ModelStatus.PENDING: "LOGGED_MODEL_PENDING",
    ModelStatus.READY: "LOGGED_MODEL_READY",
    ModelStatus.FAILED: "LOGGED_MODEL_UPLOAD_FAILED",
}


def model_out(value: LoggedModel) -> wire.MlflowLoggedModel:
    return wire.MlflowLoggedModel(
        wire.LoggedModelInfo(
            model_id=value.id,
            experiment_id=value.experiment_id,
            name=value.name,
            creation_timestamp_ms=value.created_at,
            last_updated_timestamp_ms=value.updated_at,
            artifact_uri=value.artifact_uri,
            status=_SHOWN[value.status],
            model_type=UNSET if value.kind is None else value.kind,
            source_run_id=UNSET if value.run_id is None else value.run_id,
            tags=values.tags(value.tags),
        ),
        wire.LoggedModelData(
            params=[Param(key, text) for key, text in value.params.items()],
            metrics=[
                wire.LoggedMetric(
                    metric.key,
                    number(metric.value),
                    metric.timestamp,
                    metric.step,
                    metric.model_id,
                    metric.run_id,
                    metric.dataset_name or UNSET,
                    metric.dataset_digest or UNSET,
                )
                for metric in value.metrics
            ],
        ),
    )


def _params(params: list[Param] | None) -> dict[str, str]:
    return {param.key: param.value or "" for param in params or ()}


async def create(call: Call, request: wire.CreateLoggedModel) -> wire.LoggedModelAnswer:
    model = await call.hub.registry.create_logged_model(
        call.actor,
        request.experiment_id,
        name=request.name or None,
        kind=request.model_type or "",
        run_id=request.source_run_id or "",
        params=_params(request.params),
        tags=values.tag_mapping(request.tags),
    )
    return wire.LoggedModelAnswer(model_out(model))


async def get(call: Call, request: wire.GetLoggedModel) -> wire.LoggedModelAnswer:
    model = await call.hub.registry.logged_model(
        call.actor, call.path["model_id"], allow_deleted=bool(request.allow_deleted)
    )
    return wire.LoggedModelAnswer(model_out(model))


async def finalize(call: Call, request: wire.FinalizeLoggedModel) -> wire.LoggedModelAnswer:
    status = _STATUS.get(str(request.status))
    if status is None:
        raise Refusal(
            Reason.INVALID,
            f"Invalid value {str(request.status)[:50]!r} for parameter 'status' supplied; choose one of {[*_SHOWN]}",
            field="status",
        )
    model = await call.hub.registry.finalize_logged_model(call.actor, call.path["model_id"], status)
    return wire.LoggedModelAnswer(model_out(model))


async def delete(call: Call, _request: Empty) -> Empty:
    await call.hub.registry.delete_logged_model(call.actor, call.path["model_id"])
    return Empty()


async def set_tags(call: Call, request: wire.LoggedModelTags) -> Empty:
    tags = values.tag_mapping(request.tags)
    await call.hub.registry.set_logged_model_tags(call.actor, call.path["model_id"], tags)
    return Empty()


async def delete_tag(call: Call, _request: Empty) -> Empty:
    await call.hub.registry.delete_logged_model_tag(call.actor, call.path["model_id"], call.path["key"])
    return Empty()


async def log_params(call: Call, request: wire.LoggedModelParams) -> Empty:
    await call.hub.registry.log_logged_model_params(call.actor, call.path["model_id"], _params(request.params))
    return Empty()


async def search(call: Call, request: wire.SearchLoggedModels) -> wire.LoggedModelsAnswer:
    page = await call.hub.registry.search_logged_models(
        call.actor,
        request.experiment_ids,
        request.filter,
        [(item.dataset_name, item.dataset_digest or None) for item in request.datasets or ()],
        [
            (
                item.field_name,
                item.ascending is not False,
                (item.dataset_name, item.dataset_digest or None) if item.dataset_name else None,
            )
            for item in request.order_by or ()
        ],
        values.limit(request.max_results or None, PAGE, LONGEST_PAGE),
        request.page_token or None,
    )
    return wire.LoggedModelsAnswer([model_out(model) for model in page.items], page.next_token or UNSET)


async def artifacts(call: Call, request: wire.ModelDirectory) -> wire.ModelFilesAnswer:
    model = await call.hub.registry.logged_model(call.actor, call.path["model_id"])
    folder = request.artifact_directory_path or ""
    found = await call.hub.tracking.artifacts(call.actor, f"{MODELS}{model.id}", folder)
    return wire.ModelFilesAnswer(model.artifact_uri, [values.file(artifact) for artifact in found])
