"""Handlers of launchers and runners, and of the machines that they serve."""

from __future__ import annotations

from dataclasses import asdict

import msgspec

from ...model.capacity import MachineSetSpec
from ...model.jobs import AttemptEnd, Feed
from ...model.quotas import JobQuotaSpec
from ...model.refusal import Reason, Refusal
from ...services.jobs.launches import Launch
from .. import files
from ..routing import MIB, Call
from . import job_wire, wire
from .jobs import job_out

FEED_LIMIT = 4 * MIB
"""Most bytes of output or items in one message of a runner."""


async def poll(call: Call, request: job_wire.LauncherPoll) -> job_wire.LauncherOrdersOut:
    orders = await call.hub.launchers.poll(
        call.actor,
        call.path["name"],
        machines=request.machines,
        providers=request.providers,
        known=request.known,
        gone=request.gone,
        last_lines=dict(zip(request.gone, request.last_lines, strict=False)),  # a launcher of before sends none
        wait_s=request.wait_s,
        protocol=request.protocol,
    )
    return job_wire.LauncherOrdersOut(
        start=[_launch(launch) for launch in orders.start], kill=list(orders.kill), forget=list(orders.forget)
    )


async def beat(call: Call, request: job_wire.Beat) -> job_wire.OrderOut:
    order = await call.hub.attempts.beat(
        call.actor,
        call.path["id"],
        _number(call),
        is_running=request.is_running,
        cost_usd=request.cost_usd,
        saved_at=request.saved_at,
        note=request.note,
        protocol=request.protocol,
        saves=[msgspec.structs.asdict(note) for note in request.saves],
        gpus=[msgspec.structs.asdict(sample) for sample in request.gpus],
    )
    return job_wire.OrderOut(order.command, order.number, order.grace_s, order.now)


async def add_output(call: Call, _request: None) -> job_wire.FeedSize:
    return await _add_to_feed(call, "output")


async def add_items(call: Call, _request: None) -> job_wire.FeedSize:
    return await _add_to_feed(call, "items")


async def _add_to_feed(call: Call, feed: Feed) -> job_wire.FeedSize:
    start = files.query_value(call, "start")
    if not (start.isascii() and start.isdecimal() and len(start) < 19):
        raise Refusal(Reason.INVALID, f"start={start[:40]!r}: is no offset; send a whole number", field="start")
    body = b"".join([chunk async for chunk in call.chunks])
    place = (call.path["id"], _number(call), feed, int(start))
    return job_wire.FeedSize(await call.hub.attempts.add_to_feed(call.actor, *place, body))


async def put_result(call: Call, _request: None) -> wire.Done:
    await call.hub.attempts.put_result(
        call.actor, call.path["id"], _number(call), call.path["name"], call.chunks, call.size
    )
    return wire.Done()


async def end(call: Call, request: job_wire.AttemptEndIn) -> wire.Done:
    await call.hub.attempts.end(
        call.actor,
        call.path["id"],
        _number(call),
        AttemptEnd(request.end),
        error=request.error,
        cost_usd=request.cost_usd,
        keeps=request.keeps,
        may_retry=request.may_retry,
    )
    return wire.Done()


async def next_attempt(call: Call, request: job_wire.NextIn) -> job_wire.NextOut:
    order = await call.hub.attempts.next(
        call.actor,
        call.path["id"],
        _number(call),
        idle_cost_usd=request.idle_cost_usd,
        wait_s=request.wait_s,
    )
    return job_wire.NextOut(None if order.launch is None else _launch(order.launch), order.is_over)


async def give_back(call: Call, request: job_wire.NextIn) -> wire.Done:
    await call.hub.attempts.give_back(call.actor, call.path["id"], _number(call), idle_cost_usd=request.idle_cost_usd)
    return wire.Done()


async def start_trial(call: Call, request: job_wire.NewTrialJob) -> job_wire.JobOut:
    record = await call.hub.trial_jobs.start(call.actor, call.path["id"], _number(call), request.number, request.task)
    return await job_out(call, record)


async def trial_jobs(call: Call, _request: wire.Nothing) -> job_wire.TrialJobsOut:
    return job_wire.TrialJobsOut(await call.hub.trial_jobs.unfinished(call.actor, call.path["id"], _number(call)))


def _number(call: Call) -> int:
    number = call.path["number"]
    if not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise Refusal(Reason.INVALID, f"number={number[:40]!r}: is no attempt; send a whole number", field="number")
    return int(number)


def _launch(launch: Launch) -> job_wire.LaunchOut:
    return job_wire.LaunchOut(
        job=launch.job,
        attempt=launch.attempt,
        name=launch.name,
        project=launch.project,
        token=launch.token,
        spec=job_wire.JobSpecWire(**asdict(launch.spec)),
        machines=job_wire.MachineSetWire(**asdict(launch.machines)),
        nodes=list(launch.nodes),
        devices=list(launch.devices),
        grace_s=launch.grace_s,
        keep_s=launch.keep_s,
        code=launch.code,
    )


# Capacity -------------------------------------------------------------------------------------------------------------


async def capacity(call: Call, _request: wire.Nothing) -> job_wire.CapacityOut:
    stranded = await call.hub.queue.stranded()
    return job_wire.CapacityOut(
        [
            job_wire.MachineSetOut(
                name=record.spec.name,
                machines=job_wire.MachineSetWire(**asdict(record.spec)),
                is_draining=record.is_draining,
                full_until=record.full_until,
                used_nodes=record.used_nodes,
                used_devices=record.used_devices,
                stranded_devices=stranded.get(record.spec.name, 0),
                usd_per_hour=record.usd_per_hour,
                idle_usd_per_hour=record.spec.usd_per_hour * record.idle_nodes,
                jobs=dict(record.jobs),
                kept_nodes=record.kept_nodes,
                kept_cost_usd=record.kept_cost_usd,
            )
            for record in await call.hub.capacity.sets(call.actor)
        ]
    )


async def declare(call: Call, request: job_wire.MachineSetWire) -> wire.Done:
    await call.hub.capacity.declare(call.actor, MachineSetSpec(**msgspec.structs.asdict(request)))
    return wire.Done()


async def drain(call: Call, request: job_wire.Drain) -> wire.Done:
    await call.hub.capacity.drain(call.actor, call.path["name"], request.is_draining)
    return wire.Done()


async def remove(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.capacity.remove(call.actor, call.path["name"])
    return wire.Done()


async def job_quotas(call: Call, _request: wire.Nothing) -> job_wire.JobQuotasOut:
    return job_wire.JobQuotasOut(
        [
            job_wire.JobQuotaOut(
                holder=record.holder,
                name=record.name,
                quota=job_wire.JobQuotaWire(**asdict(record.spec)),
                devices=dict(record.devices),
                nodes=record.nodes,
                jobs=record.jobs,
                today_usd=record.today_usd,
                month_usd=record.month_usd,
            )
            for record in await call.hub.quotas.job_quotas(call.actor)
        ]
    )


async def set_project_quota(call: Call, request: job_wire.JobQuotaWire) -> wire.Done:
    spec = JobQuotaSpec(**msgspec.structs.asdict(request))
    await call.hub.quotas.set_job_quota(call.actor, "project", call.path["name"], spec)
    return wire.Done()


async def set_user_quota(call: Call, request: job_wire.JobQuotaWire) -> wire.Done:
    spec = JobQuotaSpec(**msgspec.structs.asdict(request))
    await call.hub.quotas.set_job_quota(call.actor, "user", call.path["name"], spec)
    return wire.Done()
