"""Table of MLflow's routes. Each has a twin below `/ajax-api`, which MLflow's own pages use."""

from __future__ import annotations

from ...model.access import Right
from ..reply import Bytes, Empty, Text
from ..routing import MIB, Handler, Route
from . import artifacts, experiments, registry_table, runs, server, wire
from .twins import route

ARTIFACT_LIMIT = 1024 * 1024 * MIB
"""Largest artifact in bytes: it is streamed, so memory does not bound it."""

READ, WRITE = Right.READ, Right.WRITE


def mlflow(
    method: str,
    path: str,
    request: type,
    answer: type,
    right: Right,
    handler: Handler,
    summary: str,
    body_limit: int = 16 * MIB,
) -> Route:
    """Make a route of experiments or runs."""
    resource = "experiment" if path.startswith("experiments/") else "run"
    return route(method, f"mlflow/{path}", request, answer, right, resource, handler, summary, body_limit=body_limit)


EXPERIMENTS = (
    mlflow(
        "POST",
        "experiments/create",
        wire.CreateExperiment,
        wire.ExperimentCreated,
        WRITE,
        experiments.create,
        "Create an experiment.",
    ),
    mlflow(
        "GET",
        "experiments/get",
        wire.ExperimentId,
        wire.ExperimentAnswer,
        READ,
        experiments.get,
        "Get an experiment by id.",
    ),
    mlflow(
        "GET",
        "experiments/get-by-name",
        wire.ExperimentNamed,
        wire.ExperimentAnswer,
        READ,
        experiments.get_by_name,
        "Get an experiment by name.",
    ),
    mlflow(
        "POST",
        "experiments/search",
        wire.SearchExperiments,
        wire.ExperimentsAnswer,
        READ,
        experiments.search,
        "Search experiments.",
    ),
    mlflow(
        "GET",
        "experiments/search",
        wire.SearchExperiments,
        wire.ExperimentsAnswer,
        READ,
        experiments.search,
        "Search experiments.",
    ),
    mlflow(
        "POST",
        "experiments/update",
        wire.UpdateExperiment,
        Empty,
        WRITE,
        experiments.update,
        "Rename an experiment.",
    ),
    mlflow(
        "POST",
        "experiments/delete",
        wire.ExperimentId,
        Empty,
        WRITE,
        experiments.delete,
        "Move an experiment to the bin.",
    ),
    mlflow(
        "POST",
        "experiments/restore",
        wire.ExperimentId,
        Empty,
        WRITE,
        experiments.restore,
        "Restore a deleted experiment.",
    ),
    mlflow(
        "POST",
        "experiments/set-experiment-tag",
        wire.SetExperimentTag,
        Empty,
        WRITE,
        experiments.set_tag,
        "Set a tag of an experiment.",
    ),
    mlflow(
        "POST",
        "experiments/delete-experiment-tag",
        wire.DeleteExperimentTag,
        Empty,
        WRITE,
        experiments.delete_tag,
        "Delete a tag of an experiment.",
    ),
)

RUNS = (
    mlflow("POST", "runs/create", wire.CreateRun, wire.RunAnswer, WRITE, runs.create, "Create a run."),
    mlflow("GET", "runs/get", wire.GetRun, wire.RunAnswer, READ, runs.get, "Get a run."),
    mlflow("POST", "runs/update", wire.UpdateRun, wire.RunInfoAnswer, WRITE, runs.update, "Set status, end or name."),
    mlflow("POST", "runs/delete", wire.RunId, Empty, WRITE, runs.delete, "Move a run to the bin."),
    mlflow("POST", "runs/restore", wire.RunId, Empty, WRITE, runs.restore, "Restore a deleted run."),
    mlflow("POST", "runs/search", wire.SearchRuns, wire.RunsAnswer, READ, runs.search, "Search runs."),
    mlflow("POST", "runs/log-metric", wire.LogMetric, Empty, WRITE, runs.log_metric, "Log one point of a metric."),
    mlflow("POST", "runs/log-parameter", wire.LogParam, Empty, WRITE, runs.log_param, "Log a parameter."),
    mlflow("POST", "runs/set-tag", wire.SetTag, Empty, WRITE, runs.set_tag, "Set a tag of a run."),
    mlflow("POST", "runs/delete-tag", wire.DeleteTag, Empty, WRITE, runs.delete_tag, "Delete a tag of a run."),
    mlflow(
        "POST",
        "runs/log-batch",
        wire.LogBatch,
        Empty,
        WRITE,
        runs.log_batch,
        "Log metrics, parameters and tags at once.",
        runs.BATCH_BYTES,
    ),
    mlflow("POST", "runs/log-model", wire.LogModel, Empty, WRITE, runs.log_model, "Record a model of a run."),
    mlflow("POST", "runs/log-inputs", wire.LogInputs, Empty, WRITE, runs.log_inputs, "Record datasets and models."),
    mlflow("POST", "runs/outputs", wire.LogOutputs, Empty, WRITE, runs.log_outputs, "Record models that a run made."),
    mlflow(
        "GET",
        "metrics/get-history",
        wire.GetHistory,
        wire.HistoryAnswer,
        READ,
        runs.history,
        "Get all points of a metric.",
    ),
    mlflow(
        "GET",
        "metrics/get-history-bulk",
        wire.GetHistoryBulk,
        wire.HistoryOfRunsAnswer,
        READ,
        runs.history_bulk,
        "Get the points of one metric of several runs.",
    ),
    mlflow(
        "GET",
        "metrics/get-history-bulk-interval",
        wire.GetHistoryBulkInterval,
        wire.HistoryOfRunsAnswer,
        READ,
        runs.history_bulk_interval,
        "Get thinned points of one metric of several runs.",
    ),
)

ARTIFACTS = (
    route(
        "GET",
        "mlflow/artifacts/list",
        wire.ListArtifacts,
        wire.FilesAnswer,
        READ,
        "artifact",
        artifacts.list_of_run,
        "List artifacts of a run.",
    ),
    route(
        "GET",
        "mlflow-artifacts/artifacts",
        wire.ArtifactPath,
        wire.FilesAnswer,
        READ,
        "artifact",
        artifacts.list_below,
        "List artifacts below a path.",
    ),
    route(
        "GET",
        "mlflow-artifacts/artifacts/{path:path}",
        Bytes,
        Bytes,
        READ,
        "artifact",
        artifacts.download,
        "Download an artifact.",
    ),
    route(
        "PUT",
        "mlflow-artifacts/artifacts/{path:path}",
        Bytes,
        Empty,
        WRITE,
        "artifact",
        artifacts.upload,
        "Upload an artifact.",
        body_limit=ARTIFACT_LIMIT,
    ),
    route(
        "DELETE",
        "mlflow-artifacts/artifacts/{path:path}",
        Bytes,
        Empty,
        WRITE,
        "artifact",
        artifacts.delete,
        "Delete an artifact.",
    ),
    Route(
        "GET",
        "/get-artifact",
        wire.ArtifactOfRun,
        Bytes,
        READ,
        "artifact",
        artifacts.get_of_run,
        "Download an artifact of a run.",
        twins=("/ajax-api/2.0/mlflow/get-artifact",),
    ),
)

SERVER = (
    Route("GET", "/health", Empty, Text, Right.NONE, "server", server.health, "Tell that the server runs."),
    Route("GET", "/version", Empty, Text, Right.NONE, "server", server.version, "Tell the version of MLflow's API."),
    route(
        "GET",
        "mlflow/server-info",
        Empty,
        wire.ServerInfo,
        Right.NONE,
        "server",
        server.info,
        "Tell what the server can do.",
        version="3.0",
    ),
    route(
        "GET",
        "mlflow/workspaces",
        Empty,
        wire.WorkspacesAnswer,
        READ,
        "project",
        server.workspaces,
        "List projects.",
        version="3.0",
    ),
    route(
        "POST",
        "mlflow/workspaces",
        wire.Workspace,
        wire.WorkspaceAnswer,
        Right.OWN,
        "project",
        server.create_workspace,
        "Create a project.",
        version="3.0",
        status=201,
    ),
    route(
        "GET",
        "mlflow/workspaces/{name}",
        Empty,
        wire.WorkspaceAnswer,
        READ,
        "project",
        server.workspace,
        "Get a project.",
        version="3.0",
    ),
)

ROUTES: tuple[Route, ...] = (*EXPERIMENTS, *RUNS, *ARTIFACTS, *registry_table.ROUTES, *SERVER)
