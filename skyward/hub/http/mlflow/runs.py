"""Handlers of MLflow's runs, their metrics, parameters, tags and inputs."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from ...model.refusal import Reason, Refusal
from ...model.runs import Run
from ...services.search import View
from ..reply import Empty
from ..routing import Call
from . import values, wire

MOST_RUNS = 50_000
MOST_POINTS = 25_000
BULK_RUNS = 100
POINTS_OF_A_RUN = 2_500
"""Points for each run that `get-history-bulk-interval` gives, as in MLflow."""

BATCH_BYTES = 1_000_000
MOST_METRICS, MOST_PARAMS, MOST_TAGS, MOST_ENTITIES = 1000, 100, 100, 1000

EMPTY = Empty()


async def create(call: Call, request: wire.CreateRun) -> wire.RunAnswer:
    tags = values.tag_mapping(request.tags)
    name = request.run_name or None
    if name is not None and tags.get("mlflow.runName", name) != name:
        raise Refusal(
            Reason.INVALID,
            f"Both 'run_name' argument and 'mlflow.runName' tag are specified, but with different values "
            f"(run_name='{name}', mlflow.runName='{tags['mlflow.runName']}').",
            field="run_name",
        )
    if request.user_id and "mlflow.user" not in tags:
        tags["mlflow.user"] = request.user_id
    run = await call.hub.tracking.create_run(
        call.actor, request.experiment_id or "0", name=name, started_at=request.start_time or None, tags=tags
    )
    answer = values.run(run)
    answer.outputs = UNSET  # MLflow gives this object, mostly empty, wherever it reads a run, but not here
    return wire.RunAnswer(answer)


async def get(call: Call, request: wire.GetRun) -> wire.RunAnswer:
    run_id = request.run_id or request.run_uuid
    if not run_id:
        raise Refusal(Reason.INVALID, "Missing value for required parameter 'run_id'", field="run_id")
    return wire.RunAnswer(values.run(await call.hub.tracking.run(call.actor, run_id)))


async def update(call: Call, request: wire.UpdateRun) -> wire.RunInfoAnswer:
    run: Run = await call.hub.tracking.update_run(
        call.actor,
        request.run_id,
        state=values.state(request.status),
        ended_at=request.end_time,
        name=request.run_name or None,
    )
    return wire.RunInfoAnswer(values.run_info(run))


async def delete(call: Call, request: wire.RunId) -> Empty:
    await call.hub.tracking.delete_run(call.actor, request.run_id)
    return EMPTY


async def restore(call: Call, request: wire.RunId) -> Empty:
    await call.hub.tracking.restore_run(call.actor, request.run_id)
    return EMPTY


async def search(call: Call, request: wire.SearchRuns) -> wire.RunsAnswer:
    page = await call.hub.tracking.search_runs(
        call.actor,
        request.experiment_ids or [],
        request.filter or "",
        request.order_by or [],
        values.limit(request.max_results, 1000, MOST_RUNS),
        request.page_token or None,
        View(values.view(request.run_view_type)),
    )
    return wire.RunsAnswer([values.run(run) for run in page.items], page.next_token or UNSET)


async def log_metric(call: Call, request: wire.LogMetric) -> Empty:
    columns = values.point(request.key, request.value, request.timestamp, request.step)
    await call.hub.tracking.log_points(call.actor, request.run_id, columns)
    if request.model_id:
        await call.hub.registry.log_model_metrics(call.actor, values.model_metrics(request.run_id, [request]))
    return EMPTY


async def log_param(call: Call, request: wire.LogParam) -> Empty:
    await call.hub.tracking.log_params(call.actor, request.run_id, {request.key: request.value or ""})
    return EMPTY


async def set_tag(call: Call, request: wire.SetTag) -> Empty:
    await call.hub.tracking.set_tags(call.actor, request.run_id, {request.key: request.value or ""})
    return EMPTY


async def delete_tag(call: Call, request: wire.DeleteTag) -> Empty:
    await call.hub.tracking.delete_tag(call.actor, request.run_id, request.key)
    return EMPTY


async def log_batch(call: Call, request: wire.LogBatch) -> Empty:
    metrics, params, tags = request.metrics or [], request.params or [], request.tags or []
    _check_size("metrics", len(metrics), MOST_METRICS)
    _check_size("params", len(params), MOST_PARAMS)
    _check_size("tags", len(tags), MOST_TAGS)
    total = len(metrics) + len(params) + len(tags)
    if total > MOST_ENTITIES:
        raise Refusal(
            Reason.INVALID,
            f"A batch logging request can contain at most {MOST_ENTITIES} metrics, params, and tags in total. "
            f"Got {total}. Please split up across multiple requests and try again.",
            field="metrics",
        )
    await call.hub.tracking.log_batch(
        call.actor, request.run_id, values.points(metrics), _distinct(params), values.tag_mapping(tags)
    )
    if of_models := values.model_metrics(request.run_id, metrics):
        await call.hub.registry.log_model_metrics(call.actor, of_models)
    return EMPTY


def _check_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise Refusal(
            Reason.INVALID,
            f"A batch logging request can contain at most {most} {name}. Got {size} {name}. "
            "Please split up across multiple requests and try again.",
            field=name,
        )


def _distinct(params: list[wire.Param]) -> dict[str, str]:
    found: dict[str, str] = {}
    for param in params:
        value = param.value or ""
        if found.setdefault(param.key, value) != value:
            shown = [{param.key: found[param.key]}, {param.key: value}]
            raise Refusal(
                Reason.INVALID,
                f"Duplicate parameter keys have been submitted: {msgspec.json.encode(shown).decode()[:200]}. "
                "Please ensure the request contains only one param value per param key.",
                field="params",
            )
    return found


async def log_inputs(call: Call, request: wire.LogInputs) -> Empty:
    await call.hub.tracking.log_inputs(
        call.actor,
        request.run_id,
        [values.dataset_in(dataset) for dataset in request.datasets or ()],
        values.links(request.models or (), "input"),
    )
    return EMPTY


async def log_outputs(call: Call, request: wire.LogOutputs) -> Empty:
    links = values.links(request.models, "output")
    await call.hub.tracking.log_inputs(call.actor, request.run_id, [], links)
    return EMPTY


async def log_model(call: Call, request: wire.LogModel) -> Empty:
    """Add a model to the list in the tag `mlflow.log-model.history`, which clients before version 3 keep there."""
    try:
        model = msgspec.json.decode(request.model_json)
    except msgspec.DecodeError:
        model = None
    if not isinstance(model, dict):
        raise Refusal(
            Reason.INVALID,
            "Malformed model info. 'model_json' must be a JSON object; see the documentation of log-model",
            field="model_json",
        )
    missing = {"artifact_path", "flavors", "utc_time_created", "run_id"} - model.keys()
    if missing:
        raise Refusal(
            Reason.INVALID,
            f"Model json is missing mandatory fields: {sorted(missing)}",
            field="model_json",
        )
    tag = "mlflow.log-model.history"
    run = await call.hub.tracking.run(call.actor, request.run_id)
    text = msgspec.json.encode([*_models_in(run.tags.get(tag, "[]")), model]).decode()
    await call.hub.tracking.set_tags(call.actor, request.run_id, {tag: text})
    return EMPTY


def _models_in(tag: str) -> list[object]:
    """Return the models in the tag. It may hold anything, because clients set it too, and it is cut when it is long."""
    try:
        known = msgspec.json.decode(tag)
    except msgspec.DecodeError:
        return []
    return known if isinstance(known, list) else []


async def history(call: Call, request: wire.GetHistory) -> wire.HistoryAnswer:
    limit = None
    if request.max_results is not None:
        limit = min(values.limit(request.max_results, MOST_POINTS, 2**31), MOST_POINTS)
    found = await call.hub.tracking.history(
        call.actor, request.run_id, request.metric_key, limit=limit, page_token=request.page_token or None
    )
    return wire.HistoryAnswer(values.history(found), found.next_token or UNSET)


async def history_bulk(call: Call, request: wire.GetHistoryBulk) -> wire.HistoryOfRunsAnswer:
    _check_runs(request.run_id, "GetMetricHistoryBulk")
    most = min(request.max_results or MOST_POINTS, MOST_POINTS)
    return await _histories(call, sorted(request.run_id), request.metric_key, most)


async def history_bulk_interval(call: Call, request: wire.GetHistoryBulkInterval) -> wire.HistoryOfRunsAnswer:
    _check_runs(request.run_ids, "GetMetricHistoryBulkInterval")
    if (request.start_step is None) != (request.end_step is None):
        raise Refusal(
            Reason.INVALID, "If either start step or end step are specified, both must be specified.", field="end_step"
        )
    if request.start_step is not None and request.end_step is not None and request.start_step > request.end_step:
        raise Refusal(
            Reason.INVALID,
            f"end_step must be greater than start_step. Found start_step={request.start_step} and "
            f"end_step={request.end_step}.",
            field="end_step",
        )
    at_most = values.limit(request.max_results, POINTS_OF_A_RUN, POINTS_OF_A_RUN)
    metrics: list[wire.MetricOfRun] = []
    for run_id in request.run_ids:
        found = await call.hub.tracking.history(
            call.actor,
            run_id,
            request.metric_key,
            start=request.start_step,
            end=request.end_step,
            at_most=at_most,
        )
        metrics += [_of_run(metric, run_id) for metric in values.history(found)]
    return wire.HistoryOfRunsAnswer(metrics)


def _check_runs(run_ids: list[str], name: str) -> None:
    if not run_ids:
        raise Refusal(Reason.INVALID, f"{name} request must specify at least one run_id.", field="run_id")
    if len(run_ids) > BULK_RUNS:
        raise Refusal(
            Reason.INVALID,
            f"{name} request cannot specify more than {BULK_RUNS} run_ids. Received {len(run_ids)} run_ids.",
            field="run_id",
        )


async def _histories(call: Call, run_ids: list[str], key: str, most: int) -> wire.HistoryOfRunsAnswer:
    metrics: list[wire.MetricOfRun] = []
    for run_id in run_ids:
        left = most - len(metrics)
        if left <= 0:
            break
        found = await call.hub.tracking.history(call.actor, run_id, key, limit=left)
        metrics += [_of_run(metric, run_id) for metric in values.history(found)]
    return wire.HistoryOfRunsAnswer(metrics)


def _of_run(metric: wire.MetricOut, run_id: str) -> wire.MetricOfRun:
    return wire.MetricOfRun(metric.key, metric.value, metric.timestamp, metric.step, run_id)
