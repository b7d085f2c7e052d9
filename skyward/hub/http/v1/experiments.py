"""Handlers of experiments."""

from __future__ import annotations

from ...services.search import View
from ..routing import Call
from . import values, wire
from .runs import page_of_runs


async def search(call: Call, request: wire.Search) -> wire.ExperimentsOut:
    page = await call.hub.tracking.search_experiments(
        call.actor, request.filter, request.order_by, request.limit, request.page_token, View(request.view)
    )
    return wire.ExperimentsOut([await values.experiment(call, item) for item in page.items], page.next_token)


async def create(call: Call, request: wire.NewExperiment) -> wire.ExperimentOut:
    made = await call.hub.tracking.create_experiment(call.actor, request.name, request.tags)
    return await values.experiment(call, made)


async def get(call: Call, _request: wire.Nothing) -> wire.ExperimentOut:
    return await values.experiment(call, await call.hub.tracking.experiment(call.actor, call.path["id"]))


async def change(call: Call, request: wire.ExperimentChange) -> wire.ExperimentOut:
    tracking, number = call.hub.tracking, call.path["id"]
    if request.name is not None:
        await tracking.update_experiment(call.actor, number, request.name)
    for key, value in request.tags.items():
        if value is None:
            await tracking.delete_experiment_tag(call.actor, number, key)
        else:
            await tracking.set_experiment_tag(call.actor, number, key, value)
    return await values.experiment(call, await tracking.experiment(call.actor, number))


async def delete(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.tracking.delete_experiment(call.actor, call.path["id"])
    return wire.Done()


async def restore(call: Call, _request: wire.Nothing) -> wire.ExperimentOut:
    await call.hub.tracking.restore_experiment(call.actor, call.path["id"])
    return await values.experiment(call, await call.hub.tracking.experiment(call.actor, call.path["id"]))


async def runs(call: Call, request: wire.Search) -> wire.RunsOut:
    await call.hub.tracking.experiment(call.actor, call.path["id"])
    return await page_of_runs(call, [call.path["id"]], request)
