"""Handlers of sweeps that skyward runs."""

from __future__ import annotations

import json
from typing import Any

from ...model.sweeps import Parameter, TrialRecord
from ...services.hpo import SearchRecord
from ..reply import number
from ..routing import Call
from . import hpo_wire, wire
from .sweeps import sweep_number


async def start(call: Call, request: hpo_wire.NewSearch) -> hpo_wire.SearchOut:
    return _search(await call.hub.hpo.start(call.actor, request.name, request.key, request.config))


async def search(call: Call, request: hpo_wire.SearchesQuery) -> hpo_wire.SearchesOut:
    found = await call.hub.hpo.searches(call.actor, request.before, request.limit)
    return hpo_wire.SearchesOut([_search(record) for record in found])


async def get(call: Call, _request: wire.Nothing) -> hpo_wire.SearchOut:
    return _search(await call.hub.hpo.search(call.actor, sweep_number(call)))


async def trials(call: Call, request: hpo_wire.TrialsAfter) -> hpo_wire.TrialResultsOut:
    found = await call.hub.hpo.trials(call.actor, sweep_number(call), request.after, request.limit)
    return hpo_wire.TrialResultsOut([_trial(record) for record in found])


async def cancel(call: Call, _request: wire.Nothing) -> hpo_wire.SearchOut:
    return _search(await call.hub.hpo.stop(call.actor, sweep_number(call)))


async def hold(call: Call, request: hpo_wire.LeaseIn) -> hpo_wire.LeaseOut:
    sweep = sweep_number(call)
    if request.lasts_ms == 0:
        await call.hub.hpo.give_up(call.actor, sweep, request.driver, request.state)
        return hpo_wire.LeaseOut(is_held=False, fence=0, is_stopping=False)
    lease = await call.hub.hpo.hold(call.actor, sweep, request.driver, request.lasts_ms)
    return hpo_wire.LeaseOut(is_held=lease.is_held, fence=lease.fence, is_stopping=lease.is_stopping)


def _search(record: SearchRecord) -> hpo_wire.SearchOut:
    sweep = record.sweep
    return hpo_wire.SearchOut(
        id=sweep.id,
        name=sweep.name,
        owner=sweep.owner,
        status=record.status,  # type: ignore[arg-type]
        created_at=sweep.created_at,
        version=sweep.version,
        directions=[direction.value for direction in sweep.directions],
        metrics=[goal.metric for goal in record.config.objective],
        config=record.config.as_dict(),
        trials=sweep.trials,
        counts=dict(record.counts),
        best=None if record.best is None else _trial(record.best),
        run=record.run,
        job=record.job,
    )


def _trial(record: TrialRecord) -> hpo_wire.TrialResultOut:
    texts = {name: json.loads(text) for name, text in record.user_attrs.items() if name in _ATTRIBUTES}
    return hpo_wire.TrialResultOut(
        id=record.id,
        number=record.number,
        state=record.state.value,
        values=None if record.values is None else [number(item) for item in record.values],
        params={name: _value(parameter) for name, parameter in record.params.items()},
        run=texts.get("run"),
        error=texts.get("error"),
        stopped_by=texts.get("stopped_by"),
        started_us=record.started_us,
        ended_us=record.ended_us,
    )


_ATTRIBUTES = ("run", "error", "stopped_by")
"""Attributes of a trial that its driver sets."""


def _value(parameter: Parameter) -> Any:
    """Return a parameter as its trial sees it. Optuna numbers the values of a choice."""
    distribution = json.loads(parameter.distribution)
    attributes = distribution["attributes"]
    if "choices" in attributes:
        return attributes["choices"][int(parameter.value)]
    return int(parameter.value) if distribution["name"].startswith("Int") else number(parameter.value)
