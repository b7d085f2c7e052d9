"""The queue in `/v1`: its route, its request and its answer. Times are milliseconds since 1970."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ...model.queue import DeviceSpan, QueuedJob, SetPlan
from ..routing import Call
from .job_wire import JobStateName, PriorityName


class QueueQuery(Struct):
    """The queue of a project, with `limit` jobs at most."""

    limit: Annotated[int, Meta(ge=1, le=5_000)] = 500
    project: str | None = None


class QueuedJobOut(Struct):
    """A job that is not over. `place` counts the waiting jobs of all projects, `why` says why it waits."""

    id: str
    name: str
    type: str
    user: str
    status: JobStateName
    is_held: bool
    priority: PriorityName
    needs: str
    why: str
    place: int | None
    starts_by: int | None
    created_at: int
    started_at: int | None
    cost_usd: float
    attempt_count: int
    is_preemptible: bool
    max_duration_s: float


class DeviceSpanOut(Struct):
    """Devices that a job holds or has reserved. Those of other projects' jobs have neither id nor name."""

    job: str
    name: str
    state: str
    nodes: list[int]
    devices: list[int]
    each: int
    begins_at: int
    ends_by: int
    on_loan: bool


class SetPlanOut(Struct):
    """A machine set, and who has its devices until when."""

    name: str
    kind: str
    nodes: int
    devices: int
    accelerator: str
    is_draining: bool
    full_until: int
    stranded: int
    spans: list[DeviceSpanOut]


class QueueOut(Struct):
    """The queue at a time: the jobs of the project in their order, and the machine sets."""

    at: int
    waiting: int
    has_more: bool
    jobs: list[QueuedJobOut]
    sets: list[SetPlanOut]


async def get(call: Call, request: QueueQuery) -> QueueOut:
    plan = await call.hub.queue.plan(call.actor, request.limit)
    return QueueOut(plan.at, plan.waiting, plan.has_more, [_job(job) for job in plan.jobs], [*map(_set, plan.sets)])


def _job(job: QueuedJob) -> QueuedJobOut:
    record = job.record
    return QueuedJobOut(
        id=record.id,
        name=record.name,
        type=record.type,
        user=record.user,
        status=record.state.value,
        is_held=record.is_held,
        priority=record.priority.name.lower(),  # type: ignore[arg-type]
        needs=job.needs,
        why=record.why,
        place=job.place,
        starts_by=job.starts_by,
        created_at=record.created_at,
        started_at=record.started_at,
        cost_usd=record.cost_usd,
        attempt_count=record.attempt_count,
        is_preemptible=record.spec.is_preemptible,
        max_duration_s=record.spec.max_duration_s,
    )


def _set(plan: SetPlan) -> SetPlanOut:
    return SetPlanOut(
        name=plan.spec.name,
        kind=plan.spec.kind,
        nodes=plan.spec.nodes,
        devices=plan.spec.devices,
        accelerator=plan.spec.accelerator,
        is_draining=plan.is_draining,
        full_until=plan.full_until,
        stranded=plan.stranded,
        spans=[_span(span) for span in plan.spans],
    )


def _span(span: DeviceSpan) -> DeviceSpanOut:
    return DeviceSpanOut(
        job=span.job,
        name=span.name,
        state=span.state,
        nodes=list(span.nodes),
        devices=list(span.devices),
        each=span.each,
        begins_at=span.begins_at,
        ends_by=span.ends_by,
        on_loan=span.on_loan,
    )
