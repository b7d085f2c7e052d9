"""Handlers of MLflow's experiments."""

from __future__ import annotations

from msgspec import UNSET

from ...model.refusal import Reason, Refusal
from ...services.search import View
from ..reply import Empty
from ..routing import Call
from . import values, wire

MOST_EXPERIMENTS = 50_000


async def create(call: Call, request: wire.CreateExperiment) -> wire.ExperimentCreated:
    experiment = await call.hub.tracking.create_experiment(
        call.actor, request.name, values.tag_mapping(request.tags), request.artifact_location or None
    )
    return wire.ExperimentCreated(experiment.id)


async def get(call: Call, request: wire.ExperimentId) -> wire.ExperimentAnswer:
    experiment = await call.hub.tracking.experiment(call.actor, request.experiment_id)
    return wire.ExperimentAnswer(values.experiment(experiment, await call.hub.access.project_name(call.actor)))


async def get_by_name(call: Call, request: wire.ExperimentNamed) -> wire.ExperimentAnswer:
    try:
        experiment = await call.hub.tracking.experiment_named(call.actor, request.experiment_name)
    except Refusal as refusal:
        if refusal.reason is not Reason.MISSING:
            raise
        text = f"Could not find experiment with name '{request.experiment_name}'"
        raise Refusal(Reason.MISSING, text, field="experiment_name") from None
    return wire.ExperimentAnswer(values.experiment(experiment, await call.hub.access.project_name(call.actor)))


async def update(call: Call, request: wire.UpdateExperiment) -> Empty:
    await call.hub.tracking.update_experiment(call.actor, request.experiment_id, request.new_name)
    return Empty()


async def delete(call: Call, request: wire.ExperimentId) -> Empty:
    await call.hub.tracking.delete_experiment(call.actor, request.experiment_id)
    return Empty()


async def restore(call: Call, request: wire.ExperimentId) -> Empty:
    await call.hub.tracking.restore_experiment(call.actor, request.experiment_id)
    return Empty()


async def search(call: Call, request: wire.SearchExperiments) -> wire.ExperimentsAnswer:
    page = await call.hub.tracking.search_experiments(
        call.actor,
        request.filter or "",
        request.order_by or [],
        values.limit(request.max_results, 1000, MOST_EXPERIMENTS),
        request.page_token or None,
        View(values.view(request.view_type)),
    )
    workspace = await call.hub.access.project_name(call.actor)
    return wire.ExperimentsAnswer([values.experiment(item, workspace) for item in page.items], page.next_token or UNSET)


async def set_tag(call: Call, request: wire.SetExperimentTag) -> Empty:
    await call.hub.tracking.set_experiment_tag(call.actor, request.experiment_id, request.key, request.value or "")
    return Empty()


async def delete_tag(call: Call, request: wire.DeleteExperimentTag) -> Empty:
    await call.hub.tracking.delete_experiment_tag(call.actor, request.experiment_id, request.key)
    return Empty()
