"""Handlers of runs."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable

from ...model import runs as model
from ...model.batches import Batch
from ...model.points import History, PointColumns
from ...model.refusal import Reason, Refusal
from ...model.runs import RunState
from ...services.search import View
from .. import files
from ..reply import JSON, HttpReply, number
from ..routing import Call
from . import values, wire

PACKED = b"application/octet-stream"
ARROW = b"application/vnd.apache.arrow.stream"
MOST_COMPARED = 100
DEFAULT_EXPERIMENT = "Default"
"""Experiment of runs that name none. A project gets it with its first such run."""


async def page_of_runs(
    call: Call, experiment_ids: list[str] | None, request: wire.Search | wire.RunSearch
) -> wire.RunsOut:
    page = await call.hub.tracking.search_runs(
        call.actor,
        experiment_ids,
        request.filter,
        request.order_by,
        request.limit,
        request.page_token,
        View(request.view),
    )
    return wire.RunsOut(await values.runs(call, page.items), page.next_token)


async def search(call: Call, request: wire.RunSearch) -> wire.RunsOut:
    return await page_of_runs(call, request.experiment_id or None, request)


async def create(call: Call, request: wire.NewRun) -> wire.RunOut:
    made = await call.hub.tracking.create_run(
        call.actor,
        await _experiment_id(call, request),
        run_id=request.id,
        name=request.name,
        started_at=request.start_time,
        tags=request.tags,
        params=values.texts(request.params),
    )
    return await values.run(call, made)


async def _experiment_id(call: Call, request: wire.NewRun) -> str:
    if request.experiment_id is not None:
        return request.experiment_id
    name = request.experiment or DEFAULT_EXPERIMENT
    try:
        found = await call.hub.tracking.experiment_named(call.actor, name)
    except Refusal as refusal:
        if refusal.reason is not Reason.MISSING:
            raise
        found = await call.hub.tracking.create_experiment(call.actor, name)
    return found.id


async def get(call: Call, _request: wire.Nothing) -> wire.RunOut:
    return await values.run(call, await call.hub.tracking.run(call.actor, call.path["id"]))


async def change(call: Call, request: wire.RunChange | wire.StatusChange) -> wire.RunOut:
    state = None if request.status is None else RunState(request.status)
    changed = await call.hub.tracking.update_run(
        call.actor,
        call.path["id"],
        state=state,
        ended_at=request.end_time,
        name=request.name if isinstance(request, wire.RunChange) else None,
        error=request.error,
    )
    return await values.run(call, changed)


async def delete(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.tracking.delete_run(call.actor, call.path["id"])
    return wire.Done()


async def restore(call: Call, _request: wire.Nothing) -> wire.RunOut:
    await call.hub.tracking.restore_run(call.actor, call.path["id"])
    return await values.run(call, await call.hub.tracking.run(call.actor, call.path["id"]))


async def log_metrics(call: Call, request: wire.NewMetrics) -> wire.Done:
    columns = PointColumns()
    now = call.hub.database.clock()
    try:
        for metric in request.metrics:
            at = now if metric.timestamp is None else metric.timestamp
            columns.append(metric.key, metric.step, at, metric.value)
    except OverflowError:
        raise Refusal(Reason.INVALID, "metrics: a step or timestamp beyond 64 bits; send a smaller one") from None
    await call.hub.tracking.log_points(call.actor, call.path["id"], columns)
    return wire.Done()


async def log_params(call: Call, request: wire.NewParams) -> wire.Done:
    await call.hub.tracking.log_params(call.actor, call.path["id"], values.texts(request.params))
    return wire.Done()


async def set_tags(call: Call, request: wire.NewTags) -> wire.Done:
    tracking, run_id = call.hub.tracking, call.path["id"]
    await tracking.set_tags(call.actor, run_id, {key: text for key, text in request.tags.items() if text is not None})
    for key, text in request.tags.items():
        if text is None:
            await tracking.delete_tag(call.actor, run_id, key)
    return wire.Done()


async def compare(call: Call, request: wire.Compare) -> wire.ComparisonOut:
    if not 1 <= len(request.run) <= MOST_COMPARED:
        raise Refusal(Reason.INVALID, f"run: {len(request.run)} given; name 1 to {MOST_COMPARED}", field="run")
    found = [await call.hub.tracking.run(call.actor, run_id) for run_id in request.run]
    latest = [{metric.key: number(metric.value) for metric in run.metrics} for run in found]
    wanted = [name.strip() for name in request.metrics.split(",") if name.strip()]
    keys = wanted or sorted({key for metrics in latest for key in metrics})
    names = sorted({key for run in found for key in run.params})
    params = {name: [run.params.get(name) for run in found] for name in names}
    return wire.ComparisonOut(
        runs=await values.runs(call, found),
        params=params,
        metrics={key: [metrics.get(key) for metrics in latest] for key in keys},
        different_params=[name for name, row in params.items() if len(set(row)) > 1],
    )


async def points(call: Call, request: wire.PointsQuery) -> wire.Points | HttpReply:
    history = await call.hub.tracking.history(
        call.actor, call.path["id"], request.key, start=request.start, end=request.end, at_most=request.at_most
    )
    accepted = call.headers.get(b"accept", JSON)
    if PACKED in accepted:
        return HttpReply(packed(history), content_type=PACKED)
    if ARROW in accepted:
        return HttpReply(arrow(history), content_type=ARROW)
    return wire.Points(
        history.key, list(history.steps), list(history.timestamps), [number(value) for value in history.values]
    )


def packed(history: History) -> bytes:
    """Pack a history little-endian: its length, steps, timestamps (int64 each) and values (float64)."""
    columns: tuple[array[int] | array[float], ...] = (history.steps, history.timestamps, history.values)
    if sys.byteorder == "big":
        columns = tuple(array(column.typecode, column) for column in columns)
        for column in columns:
            column.byteswap()
    return b"".join([struct.pack("<q", len(history)), *(column.tobytes() for column in columns)])


def arrow(history: History) -> bytes:
    """Write a history as an Arrow stream.

    Raises:
        Refusal: pyarrow is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise Refusal(
            Reason.UNSUPPORTED, "accept: Arrow needs pyarrow, which this hub lacks; accept application/octet-stream"
        ) from None
    table = pyarrow.table(
        {
            "step": pyarrow.array(history.steps, pyarrow.int64()),
            "timestamp": pyarrow.array(history.timestamps, pyarrow.int64()),
            "value": pyarrow.array(history.values, pyarrow.float64()),
        }
    )
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


async def artifacts(call: Call, request: wire.ArtifactQuery) -> wire.ArtifactsOut:
    found: Iterable[model.Artifact] = await call.hub.tracking.artifacts(call.actor, call.path["id"], request.prefix)
    return wire.ArtifactsOut(values.artifacts(found))


async def upload_artifact(call: Call, _request: None) -> wire.ArtifactOut:
    key = files.query_value(call, "key")
    return values.artifact(await files.upload(call, call.path["id"], key))


async def download_artifact(call: Call, request: wire.DownloadQuery) -> HttpReply:
    if request.redirect:
        return await files.redirect(call, call.path["id"], call.path["key"])
    return await files.download(call, call.path["id"], call.path["key"])


async def delete_artifact(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.tracking.delete_artifact(call.actor, call.path["id"], call.path["key"])
    return wire.Done()


async def accept_batch(call: Call, request: wire.BatchIn) -> wire.BatchOut:
    batch = Batch(request.client, request.first, request.records)
    answer = await call.hub.tracking.accept_batch(call.actor, call.path["id"], batch)
    return wire.BatchOut(
        answer.accepted,
        answer.state.value,
        [wire.CollectedCommand(command.number, command.action) for command in answer.commands],
        [wire.RefusedRecordOut(refused.number, refused.message) for refused in answer.refused],
    )


async def put_blob(call: Call, _request: None) -> wire.BlobOut:
    sha256 = call.path["sha256"]
    run_id = files.query_value(call, "run")
    size = await call.hub.tracking.put_blob(call.actor, run_id, sha256, call.chunks, call.size)
    return wire.BlobOut(sha256, size)


async def send_command(call: Call, request: wire.NewCommand) -> wire.CommandOut:
    return values.command(await call.hub.tracking.send_command(call.actor, call.path["id"], request.action))


async def commands(call: Call, _request: wire.Nothing) -> wire.Commands:
    found = await call.hub.tracking.commands(call.actor, call.path["id"])
    return wire.Commands([values.command(command) for command in found])
