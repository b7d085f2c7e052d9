"""Handlers of jobs, as their users see them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import msgspec

from ...model.command_jobs import command_spec
from ...model.jobs import Feed, JobPriority, JobRecord, JobSpec, JobState
from ...model.refusal import Reason, Refusal
from ...services.jobs.jobs import FeedPiece, NewJob
from ..reply import HttpReply
from ..routing import Call
from . import job_wire, wire

STREAM = b"text/event-stream; charset=utf-8"


async def submit(call: Call, request: job_wire.NewJobIn) -> job_wire.JobOut:
    new = NewJob(
        name=request.name,
        spec=spec_of(request),
        blobs=request.blobs,
        type=request.type,
        priority=JobPriority[request.priority.upper()],
        is_held=request.is_held,
        key=request.key,
    )
    return await job_out(call, await call.hub.jobs.submit(call.actor, new))


def spec_of(request: job_wire.NewJobIn) -> JobSpec:
    """Return the spec of a call, or make that of a command or an operation."""
    asdict = msgspec.structs.asdict
    if request.spec is not None and not request.command and not request.operation:
        if request.spec.trials is not None:
            _check_trials(request.spec.trials)
        return JobSpec(**asdict(request.spec))
    if request.spec is not None or bool(request.command) == bool(request.operation):
        raise Refusal(
            Reason.INVALID,
            "spec: a job is a call, a command or an operation; send one of spec, command and operation",
            field="spec",
        )
    return command_spec(
        request.command,
        image=request.image,
        env=request.env,
        secrets=request.secrets,
        resources=asdict(request.resources),
        distributed=asdict(request.distributed),
        storage=asdict(request.storage),
        schedule=asdict(request.schedule),
        region=request.region,
        labels=request.labels,
        retries=request.retries,
        budget_usd=request.budget_usd,
        operation=request.operation,
        params=request.params,
        notify=request.notify,
        notify_wait_s=request.notify_wait_s,
        code_path=request.code_path,
        code_folder=request.code_folder,
    )


def _check_trials(trials: dict[str, Any]) -> None:
    """Check the request of a sweep's trials as that of any job."""
    try:
        msgspec.convert(trials, job_wire.JobSpecWire)
    except msgspec.ValidationError as error:
        raise Refusal(Reason.INVALID, f"spec.trials: {error}; send the spec of a job", field="spec.trials") from None


async def search(call: Call, request: job_wire.JobsQuery) -> job_wire.JobsOut:
    states = [JobState(name) for name in request.status]
    page = await call.hub.jobs.jobs(
        call.actor, request.limit, request.page_token, states, request.sweep, request.trials
    )
    return job_wire.JobsOut([await job_out(call, record) for record in page.items], page.next_token)


async def get(call: Call, _request: wire.Nothing) -> job_wire.JobOut:
    return await job_out(call, await call.hub.jobs.job(call.actor, call.path["id"]))


async def delete(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.jobs.delete(call.actor, call.path["id"])
    return wire.Done()


async def cancel(call: Call, _request: wire.Nothing) -> job_wire.JobOut:
    return await job_out(call, await call.hub.jobs.cancel(call.actor, call.path["id"]))


async def save(call: Call, _request: wire.Nothing) -> job_wire.JobOut:
    return await job_out(call, await call.hub.jobs.save(call.actor, call.path["id"]))


async def retry(call: Call, _request: wire.Nothing) -> job_wire.JobOut:
    return await job_out(call, await call.hub.jobs.retry(call.actor, call.path["id"]))


async def hold(call: Call, _request: wire.Nothing) -> job_wire.JobOut:
    return await job_out(call, await call.hub.jobs.hold(call.actor, call.path["id"]))


async def release(call: Call, _request: wire.Nothing) -> job_wire.JobOut:
    return await job_out(call, await call.hub.jobs.release(call.actor, call.path["id"]))


async def put_blob(call: Call, _request: None) -> wire.BlobOut:
    sha256 = call.path["sha256"]
    return wire.BlobOut(sha256, await call.hub.jobs.put_job_blob(call.actor, sha256, call.chunks, call.size))


async def get_result(call: Call, _request: wire.Nothing) -> HttpReply:
    size, content = await call.hub.jobs.open_blob(call.actor, call.path["id"], call.path["name"])
    return HttpReply(
        _pieces(content), content_type=b"application/octet-stream", headers={b"content-length": b"%d" % size}
    )


async def output(call: Call, request: job_wire.FeedQuery) -> HttpReply:
    """Stream output as server-sent events: `{"attempt", "start", "text"}`, with the bytes as base64 in `data`."""
    return await _follow(call, request, "output")


async def items(call: Call, request: job_wire.FeedQuery) -> HttpReply:
    """Stream packed items as server-sent events: `{"attempt", "start", "data"}`; see `pack_item` of the runner."""
    return await _follow(call, request, "items")


async def _follow(call: Call, request: job_wire.FeedQuery, feed: Feed) -> HttpReply:
    """Stream the bytes of a feed.

    The id of an event is `attempt:offset` of the byte behind it, so a reader that comes back goes on there.
    """
    attempt, start = request.attempt, request.start
    number, separator, offset = call.header(b"last-event-id").partition(":")
    if separator and number.isdecimal() and offset.isdecimal():
        attempt, start = int(number), int(offset)
    await call.hub.jobs.job(call.actor, call.path["id"])  # one that is not there is refused with a status
    pieces = call.hub.jobs.follow(
        call.actor, call.path["id"], feed=feed, attempt=attempt, start=start, ends=not request.follow
    )
    return HttpReply(_events(feed, pieces), content_type=STREAM, headers={b"x-accel-buffering": b"no"})


async def _events(feed: Feed, pieces: AsyncGenerator[FeedPiece, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        yield b": connected\n\n"
        async for piece in pieces:
            if not piece.body:
                yield b": still here\n\n"
                continue
            body: dict[str, Any] = {"attempt": piece.attempt, "start": piece.start}
            if feed == "output":
                body["text"] = piece.body.decode(errors="replace")
            body["data"] = base64.b64encode(piece.body).decode()
            event = (piece.attempt, piece.start + len(piece.body), feed.encode(), msgspec.json.encode(body))
            yield b"id: %d:%d\nevent: %s\ndata: %s\n\n" % event
        yield b"event: end\ndata: {}\n\n"


async def _pieces(content: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    while piece := await asyncio.to_thread(next, content, b""):
        yield piece


async def job_out(call: Call, record: JobRecord) -> job_wire.JobOut:
    """Translate a job."""
    return job_wire.JobOut(
        id=record.id,
        name=record.name,
        type=record.type,
        project=await call.hub.access.project_name(call.actor),
        user=record.user,
        status=record.state.value,
        is_held=record.is_held,
        priority=record.priority.name.lower(),  # type: ignore[arg-type]
        spec=job_wire.JobSpecWire(**asdict(record.spec)),
        created_at=record.created_at,
        started_at=record.started_at,
        ended_at=record.ended_at,
        why=record.why,
        cost_usd=record.cost_usd,
        attempt_count=record.attempt_count,
        results=list(record.results),
        attempts=[
            job_wire.AttemptOut(
                *(attempt.number, attempt.machines, list(attempt.nodes), attempt.reserved_at, attempt.began_at),
                *(attempt.ended_at, attempt.end, attempt.error, attempt.cost_usd, attempt.output_bytes),
                *(attempt.kept_until, attempt.idle_cost_usd, attempt.pool),
            )
            for attempt in record.attempts
        ],
        saved_at=record.saved_at,
    )
