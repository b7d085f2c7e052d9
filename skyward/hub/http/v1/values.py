"""Translation of the hub's values to `/v1`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ...model import runs as model
from ...model.refusal import Reason, Refusal
from ..reply import number
from ..routing import Call
from . import wire

SYSTEM = "system/"
"""Beginning of the names of system metrics."""


async def experiment(call: Call, value: model.Experiment) -> wire.ExperimentOut:
    project = await call.hub.access.project_name(call.actor)
    return wire.ExperimentOut(
        value.id,
        value.name,
        project,
        value.lifecycle.value,
        value.created_at,
        value.updated_at,
        dict(value.tags),
    )


async def runs(call: Call, values: Iterable[model.Run]) -> list[wire.RunOut]:
    """Translate runs, with the names of their experiments."""
    project = await call.hub.access.project_name(call.actor)
    organization = await call.hub.access.organization_name(call.actor)
    names: dict[str, str] = {}
    shown = []
    for value in values:
        if value.experiment_id not in names:
            names[value.experiment_id] = (await call.hub.tracking.experiment(call.actor, value.experiment_id)).name
        shown.append(_run(value, names[value.experiment_id], project, organization))
    return shown


async def run(call: Call, value: model.Run) -> wire.RunOut:
    """Translate one run, with its artifacts."""
    [shown] = await runs(call, [value])
    shown.artifacts = artifacts(await call.hub.tracking.artifacts(call.actor, value.id, ""))
    return shown


def _run(value: model.Run, experiment_name: str, project: str, organization: str) -> wire.RunOut:
    return wire.RunOut(
        id=value.id,
        experiment_id=value.experiment_id,
        experiment=experiment_name,
        project=project,
        organization=organization,
        name=value.name,
        status=value.state.value,
        lifecycle=value.lifecycle.value,
        user_id=value.user,
        start_time=value.started_at,
        end_time=value.ended_at,
        heartbeat_at=value.heartbeat_at,
        error=value.error,
        params=dict(value.params),
        tags=dict(value.tags),
        metrics=[
            wire.Metric(metric.key, number(metric.value), metric.step, metric.timestamp) for metric in value.metrics
        ],
        artifacts=[],
        system_metrics={
            metric.key.removeprefix(SYSTEM): number(metric.value)
            for metric in value.metrics
            if metric.key.startswith(SYSTEM)
        },
        inputs=[
            wire.DatasetOut(
                data.name, data.digest, data.source_type, data.source, data.schema, data.profile, dict(data.tags)
            )
            for data in value.inputs
        ],
    )


def artifacts(values: Iterable[model.Artifact]) -> list[wire.ArtifactOut]:
    return [artifact(value) for value in values]


def artifact(value: model.Artifact) -> wire.ArtifactOut:
    return wire.ArtifactOut(value.key, value.key, value.size, value.sha256, value.is_directory)


def command(value: model.Command) -> wire.CommandOut:
    return wire.CommandOut(value.number, value.action, value.created_at, value.acknowledged_at, value.result)


def texts(params: Mapping[str, Any]) -> dict[str, str]:
    """Turn values of parameters to text: numbers and booleans as JSON spells them, lists and objects as JSON."""
    found = {}
    for key, value in params.items():
        if value is None:
            raise Refusal(Reason.INVALID, f"params.{key[:80]}=null: not a value; leave it out", field=f"params.{key}")
        found[key] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return found
