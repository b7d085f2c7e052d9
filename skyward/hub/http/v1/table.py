"""Table of the routes of `/v1`."""

# One line for each route: wrapped, the table could not be read as one.
# ruff: noqa: E501

from __future__ import annotations

from ...model.access import Right
from ..reply import Bytes, ServerSentEvents
from ..routing import MIB, Route
from . import (
    attempts,
    events,
    experiments,
    hpo,
    hpo_wire,
    importance,
    job_history,
    job_wire,
    jobs,
    model_wire,
    models,
    operations,
    people,
    pool_wire,
    pools,
    queue,
    runs,
    server,
    sweep_wire,
    sweeps,
    usage,
    wire,
)

ARTIFACT_LIMIT = 1024 * 1024 * MIB
"""Largest artifact in bytes: it is streamed, so memory does not bound it."""

NONE, READ, WRITE, MANAGE, OWN = Right.NONE, Right.READ, Right.WRITE, Right.MANAGE, Right.OWN

# fmt: off
EXPERIMENTS = (
    Route("GET", "/v1/experiments", wire.Search, wire.ExperimentsOut, READ, "experiment", experiments.search, "Search experiments."),
    Route("POST", "/v1/experiments", wire.NewExperiment, wire.ExperimentOut, WRITE, "experiment", experiments.create, "Create an experiment.", status=201),
    Route("GET", "/v1/experiments/{id}", wire.Nothing, wire.ExperimentOut, READ, "experiment", experiments.get, "Get an experiment."),
    Route("PATCH", "/v1/experiments/{id}", wire.ExperimentChange, wire.ExperimentOut, WRITE, "experiment", experiments.change, "Rename an experiment, or change its tags."),
    Route("DELETE", "/v1/experiments/{id}", wire.Nothing, wire.Done, WRITE, "experiment", experiments.delete, "Move an experiment to the bin."),
    Route("POST", "/v1/experiments/{id}/restore", wire.Nothing, wire.ExperimentOut, WRITE, "experiment", experiments.restore, "Restore a deleted experiment."),
    Route("GET", "/v1/experiments/{id}/runs", wire.Search, wire.RunsOut, READ, "run", experiments.runs, "Search runs of an experiment."),
)

RUNS = (
    Route("GET", "/v1/runs", wire.RunSearch, wire.RunsOut, READ, "run", runs.search, "Search runs."),
    Route("POST", "/v1/runs", wire.NewRun, wire.RunOut, WRITE, "run", runs.create, "Create a run.", status=201),
    Route("GET", "/v1/runs/compare", wire.Compare, wire.ComparisonOut, READ, "run", runs.compare, "Compare parameters and metrics of runs."),
    Route("GET", "/v1/runs/{id}", wire.Nothing, wire.RunOut, READ, "run", runs.get, "Get a run."),
    Route("PATCH", "/v1/runs/{id}", wire.RunChange, wire.RunOut, WRITE, "run", runs.change, "Change name or status of a run."),
    Route("DELETE", "/v1/runs/{id}", wire.Nothing, wire.Done, WRITE, "run", runs.delete, "Move a run to the bin."),
    Route("POST", "/v1/runs/{id}/restore", wire.Nothing, wire.RunOut, WRITE, "run", runs.restore, "Restore a deleted run."),
    Route("PATCH", "/v1/runs/{id}/status", wire.StatusChange, wire.RunOut, WRITE, "run", runs.change, "Change the status of a run."),
    Route("POST", "/v1/runs/{id}/metrics", wire.NewMetrics, wire.Done, WRITE, "run", runs.log_metrics, "Log points of metrics."),
    Route("POST", "/v1/runs/{id}/params", wire.NewParams, wire.Done, WRITE, "run", runs.log_params, "Log parameters."),
    Route("POST", "/v1/runs/{id}/tags", wire.NewTags, wire.Done, WRITE, "run", runs.set_tags, "Set or delete tags."),
    Route("GET", "/v1/runs/{id}/points", wire.PointsQuery, wire.Points, READ, "run", runs.points, "Get the points of a metric as JSON, packed or as Arrow, by `Accept`."),
    Route("GET", "/v1/runs/{id}/artifacts", wire.ArtifactQuery, wire.ArtifactsOut, READ, "artifact", runs.artifacts, "List artifacts of a run."),
    Route("POST", "/v1/runs/{id}/artifacts", Bytes, wire.ArtifactOut, WRITE, "artifact", runs.upload_artifact, "Upload an artifact.", ARTIFACT_LIMIT, status=201, query=("key",)),
    Route("GET", "/v1/runs/{id}/artifacts/{key:path}", wire.DownloadQuery, Bytes, READ, "artifact", runs.download_artifact, "Download an artifact. With `redirect` the answer may be a 307 to where its bytes are."),
    Route("DELETE", "/v1/runs/{id}/artifacts/{key:path}", wire.Nothing, wire.Done, WRITE, "artifact", runs.delete_artifact, "Delete an artifact."),
    Route("GET", "/v1/runs/{id}/commands", wire.Nothing, wire.Commands, READ, "run", runs.commands, "List commands to a run."),
    Route("POST", "/v1/runs/{id}/commands", wire.NewCommand, wire.CommandOut, WRITE, "run", runs.send_command, "Send a command to a run.", status=201),
    Route("POST", "/v1/runs/{id}/batches", wire.BatchIn, wire.BatchOut, WRITE, "run", runs.accept_batch, "Send numbered records, each of which counts once."),
    Route("PUT", "/v1/blobs/{sha256}", Bytes, wire.BlobOut, WRITE, "blob", runs.put_blob, "Upload bytes that an artifact will name.", ARTIFACT_LIMIT, query=("run",)),
    Route("GET", "/v1/events", wire.EventsQuery, ServerSentEvents, READ, "event", events.events, "Follow events and points as they happen."),
)

MODELS = (
    Route("GET", "/v1/models", model_wire.ModelSearch, model_wire.ModelsOut, READ, "model", models.search, "Search registered models."),
    Route("GET", "/v1/models/{name}", wire.Nothing, model_wire.ModelOut, READ, "model", models.get, "Get a registered model with its aliases and the newest version of each stage."),
    Route("GET", "/v1/models/{name}/versions", model_wire.ModelSearch, model_wire.ModelVersionsOut, READ, "model", models.versions, "Search versions of a model."),
    Route("GET", "/v1/models/{name}/versions/{version}", wire.Nothing, model_wire.ModelVersionOut, READ, "model", models.get_version, "Get a version of a model."),
)

POOLS = (
    Route("GET", "/v1/pools", pool_wire.PoolsQuery, pool_wire.PoolsOut, READ, "pool", pools.search, "List pools, the newest first."),
    Route("GET", "/v1/pools/{id}", wire.Nothing, pool_wire.PoolHistoryOut, READ, "pool", pools.get, "Get a pool with its nodes, machines, calls and events."),
    Route("POST", "/v1/pools/{id}/batches", wire.BatchIn, wire.BatchOut, WRITE, "pool", pools.accept_batch, "Send numbered records of a pool, each of which counts once."),
)

SWEEPS = (
    Route("GET", "/v1/sweeps", sweep_wire.SweepsQuery, sweep_wire.SweepsOut, READ, "sweep", sweeps.search, "List sweeps."),
    Route("POST", "/v1/sweeps", sweep_wire.NewSweep, sweep_wire.SweepOut, WRITE, "sweep", sweeps.create, "Create a sweep.", status=201),
    Route("GET", "/v1/sweeps/{id}", wire.Nothing, sweep_wire.SweepOut, READ, "sweep", sweeps.get, "Get a sweep."),
    Route("PATCH", "/v1/sweeps/{id}", sweep_wire.SweepChange, sweep_wire.SweepOut, WRITE, "sweep", sweeps.change, "Set attributes of a sweep."),
    Route("DELETE", "/v1/sweeps/{id}", wire.Nothing, wire.Done, WRITE, "sweep", sweeps.delete, "Delete a sweep with its trials for good."),
    Route("GET", "/v1/sweeps/{id}/trials", sweep_wire.TrialsQuery, sweep_wire.TrialChangesOut, READ, "sweep", sweeps.trials, "Get the trials of a sweep that changed since a version."),
    Route("POST", "/v1/sweeps/{id}/trials", sweep_wire.NewTrial, sweep_wire.TrialOut, WRITE, "sweep", sweeps.create_trial, "Create a trial.", status=201),
    Route("GET", "/v1/sweeps/{id}/importance", importance.ImportanceQuery, importance.ImportanceOut, READ, "sweep", importance.get, "Get the importance of the parameters of a sweep, if the server has Optuna."),
    Route("GET", "/v1/sweeps/{id}/silent", sweep_wire.SilentQuery, sweep_wire.SilentTrials, READ, "sweep", sweeps.silent, "List running trials whose worker has fallen silent."),
    Route("GET", "/v1/trials/{id}", wire.Nothing, sweep_wire.TrialDetailOut, READ, "sweep", sweeps.get_trial, "Get a trial with the values that it reported."),
    Route("PATCH", "/v1/trials/{id}", sweep_wire.TrialBody, sweep_wire.TrialChanged, WRITE, "sweep", sweeps.change_trial, "Change a trial."),
    Route("POST", "/v1/trials/{id}/heartbeat", wire.Nothing, wire.Done, WRITE, "sweep", sweeps.beat, "Tell that the worker of a trial is alive."),
)

HPO = (
    Route("GET", "/v1/hpo", hpo_wire.SearchesQuery, hpo_wire.SearchesOut, READ, "sweep", hpo.search, "List the sweeps that skyward runs, the newest first."),
    Route("POST", "/v1/hpo", hpo_wire.NewSearch, hpo_wire.SearchOut, WRITE, "sweep", hpo.start, "Make a sweep, or go on with the one of that name.", MIB, status=201),
    Route("GET", "/v1/hpo/{id}", wire.Nothing, hpo_wire.SearchOut, READ, "sweep", hpo.get, "Get a sweep with its configuration, progress and best trial."),
    Route("GET", "/v1/hpo/{id}/trials", hpo_wire.TrialsAfter, hpo_wire.TrialResultsOut, READ, "sweep", hpo.trials, "List trials of a sweep with their parameters as values."),
    Route("POST", "/v1/hpo/{id}/cancel", wire.Nothing, hpo_wire.SearchOut, WRITE, "sweep", hpo.cancel, "Stop a sweep: its trials end at their next report."),
    Route("POST", "/v1/hpo/{id}/lease", hpo_wire.LeaseIn, hpo_wire.LeaseOut, WRITE, "sweep", hpo.hold, "Take, renew or end the lease of the program that drives a sweep."),
)

JOBS = (
    Route("GET", "/v1/jobs", job_wire.JobsQuery, job_wire.JobsOut, READ, "job", jobs.search, "List jobs, the newest first."),
    Route("POST", "/v1/jobs", job_wire.NewJobIn, job_wire.JobOut, WRITE, "job", jobs.submit, "Submit a job.", MIB, status=201),
    Route("GET", "/v1/operations", wire.Nothing, operations.OperationsOut, READ, "job", operations.search, "List the named operations that jobs may run, with their schemas."),
    Route("PUT", "/v1/job-blobs/{sha256}", Bytes, wire.BlobOut, WRITE, "blob", jobs.put_blob, "Upload bytes that a job will name.", ARTIFACT_LIMIT),
    Route("GET", "/v1/jobs/{id}", wire.Nothing, job_wire.JobOut, READ, "job", jobs.get, "Get a job with its attempts."),
    Route("GET", "/v1/jobs/{id}/history", wire.Nothing, job_history.JobHistoryOut, READ, "job", job_history.get, "Get what happened to a job, and what its attempts cost by the hour."),
    Route("DELETE", "/v1/jobs/{id}", wire.Nothing, wire.Done, WRITE, "job", jobs.delete, "Delete a job that is over."),
    Route("GET", "/v1/jobs/{id}/logs", job_wire.FeedQuery, ServerSentEvents, READ, "job", jobs.output, "Follow the output of a job from any byte."),
    Route("GET", "/v1/jobs/{id}/items", job_wire.FeedQuery, ServerSentEvents, READ, "job", jobs.items, "Follow the packed items of a job's generator from any byte."),
    Route("GET", "/v1/jobs/{id}/results/{name}", wire.Nothing, Bytes, READ, "job", jobs.get_result, "Download the packed value or exception of a job."),
    Route("POST", "/v1/jobs/{id}/cancel", wire.Nothing, job_wire.JobOut, WRITE, "job", jobs.cancel, "End a job for good."),
    Route("POST", "/v1/jobs/{id}/save", wire.Nothing, job_wire.JobOut, WRITE, "job", jobs.save, "Tell a running job to save a checkpoint."),
    Route("POST", "/v1/jobs/{id}/retry", wire.Nothing, job_wire.JobOut, WRITE, "job", jobs.retry, "Let a job that is over begin again."),
    Route("POST", "/v1/jobs/{id}/hold", wire.Nothing, job_wire.JobOut, WRITE, "job", jobs.hold, "Keep a waiting job from beginning."),
    Route("POST", "/v1/jobs/{id}/release", wire.Nothing, job_wire.JobOut, WRITE, "job", jobs.release, "Let a held job begin."),
    Route("POST", "/v1/jobs/{id}/attempts/{number}/beat", job_wire.Beat, job_wire.OrderOut, WRITE, "job", attempts.beat, "Renew the lease of an attempt, for its runner."),
    Route("PUT", "/v1/jobs/{id}/attempts/{number}/output", Bytes, job_wire.FeedSize, WRITE, "job", attempts.add_output, "Send output of an attempt, for its runner.", attempts.FEED_LIMIT, query=("start",)),
    Route("PUT", "/v1/jobs/{id}/attempts/{number}/items", Bytes, job_wire.FeedSize, WRITE, "job", attempts.add_items, "Send packed items of an attempt's generator, for its runner.", attempts.FEED_LIMIT, query=("start",)),
    Route("PUT", "/v1/jobs/{id}/attempts/{number}/results/{name}", Bytes, wire.Done, WRITE, "job", attempts.put_result, "Send the value or exception of an attempt, for its runner.", ARTIFACT_LIMIT),
    Route("POST", "/v1/jobs/{id}/attempts/{number}/end", job_wire.AttemptEndIn, wire.Done, WRITE, "job", attempts.end, "End an attempt, for its runner."),
    Route("POST", "/v1/jobs/{id}/attempts/{number}/next", job_wire.NextIn, job_wire.NextOut, WRITE, "job", attempts.next_attempt, "Ask for the next attempt, for a runner that waits with its machines."),
    Route("POST", "/v1/jobs/{id}/attempts/{number}/give-back", job_wire.NextIn, wire.Done, WRITE, "job", attempts.give_back, "Tell that the machines of a runner that waited are gone."),
    Route("POST", "/v1/jobs/{id}/attempts/{number}/trials", job_wire.NewTrialJob, job_wire.JobOut, WRITE, "job", attempts.start_trial, "Submit the job of a trial, or find it, for the driver of its sweep.", MIB, status=201),
    Route("GET", "/v1/jobs/{id}/attempts/{number}/trials", wire.Nothing, job_wire.TrialJobsOut, READ, "job", attempts.trial_jobs, "List the jobs of a sweep's trials that are not over, for its driver."),
    Route("POST", "/v1/launchers/{name}/poll", job_wire.LauncherPoll, job_wire.LauncherOrdersOut, OWN, "capacity", attempts.poll, "Collect what a launcher must start and kill."),
    Route("GET", "/v1/queue", queue.QueueQuery, queue.QueueOut, READ, "job", queue.get, "Get the jobs that are not over in their order, and the devices that they hold or have reserved."),
    Route("GET", "/v1/usage", usage.UsageQuery, usage.UsageOut, READ, "job", usage.get, "Get device-hours and USD of each project by day and month as JSON, or by month as CSV, by `Accept`."),
    Route("GET", "/v1/capacity", wire.Nothing, job_wire.CapacityOut, READ, "capacity", attempts.capacity, "List machine sets and their use."),
    Route("POST", "/v1/capacity", job_wire.MachineSetWire, wire.Done, OWN, "capacity", attempts.declare, "Declare a machine set.", status=201),
    Route("POST", "/v1/capacity/{name}/drain", job_wire.Drain, wire.Done, OWN, "capacity", attempts.drain, "Begin no more jobs on a machine set, or begin them again."),
    Route("DELETE", "/v1/capacity/{name}", wire.Nothing, wire.Done, OWN, "capacity", attempts.remove, "Remove a machine set that no job uses."),
    Route("GET", "/v1/job-quotas", wire.Nothing, job_wire.JobQuotasOut, READ, "capacity", attempts.job_quotas, "List quotas of jobs and their use: those of this project and user, or all for an owner."),
    Route("PUT", "/v1/projects/{name}/job-quota", job_wire.JobQuotaWire, wire.Done, OWN, "project", attempts.set_project_quota, "Set what the jobs of a project may use. Without limits, the quota is removed."),
    Route("PUT", "/v1/users/{name}/job-quota", job_wire.JobQuotaWire, wire.Done, OWN, "user", attempts.set_user_quota, "Set what the jobs of a user may use. Without limits, the quota is removed."),
)

PEOPLE = (
    Route("GET", "/v1/me", wire.Nothing, wire.Me, READ, "session", people.me, "Tell who asks, and in which role."),
    Route("POST", "/v1/session", wire.SignIn, wire.Done, NONE, "session", people.sign_in, "Exchange a one-time code for a cookie."),
    Route("DELETE", "/v1/session", wire.Nothing, wire.Done, NONE, "session", people.sign_out, "End the session of the cookie."),
    Route("GET", "/v1/projects", wire.Nothing, wire.Projects, READ, "project", people.projects, "List one's projects."),
    Route("POST", "/v1/projects", wire.NewProject, wire.ProjectOut, OWN, "organization", people.create_project, "Create a project.", status=201),
    Route("DELETE", "/v1/projects/{name}", wire.Nothing, wire.Done, OWN, "organization", people.delete_project, "Delete a project."),
    Route("GET", "/v1/projects/{name}/limits", wire.Nothing, wire.Limits, READ, "project", people.limits, "Get the limits of a project, and how much of them is used."),
    Route("PATCH", "/v1/projects/{name}/limits", wire.NewLimits, wire.Limits, OWN, "project", people.set_limits, "Set or remove limits of a project."),
    Route("GET", "/v1/projects/{name}/members", wire.Nothing, wire.Members, READ, "project", people.members, "List members of a project."),
    Route("POST", "/v1/projects/{name}/members", wire.NewMember, wire.Members, MANAGE, "project", people.set_member, "Give a user a role in a project."),
    Route("DELETE", "/v1/projects/{name}/members/{user}", wire.Nothing, wire.Done, MANAGE, "project", people.remove_member, "Remove a member."),
    Route("GET", "/v1/users", wire.Nothing, wire.UsersOut, OWN, "user", people.users, "List users."),
    Route("POST", "/v1/users", wire.NewUser, wire.SignInLink, OWN, "user", people.create_user, "Create a user or a service account.", status=201),
    Route("POST", "/v1/users/{name}/link", wire.Nothing, wire.SignInLink, OWN, "user", people.create_link, "Make a one-time sign-in link.", status=201),
    Route("DELETE", "/v1/users/{name}", wire.Nothing, wire.Done, OWN, "user", people.disable_user, "Disable a user for good."),
    Route("GET", "/v1/tokens", wire.TokensQuery, wire.Tokens, READ, "token", people.tokens, "List tokens."),
    Route("POST", "/v1/tokens", wire.TokenIn, wire.CreatedToken, READ, "token", people.create_token, "Create a token.", status=201),
    Route("DELETE", "/v1/tokens/{id}", wire.Nothing, wire.Done, READ, "token", people.revoke_token, "Revoke a token."),
    Route("GET", "/v1/audit", wire.AuditQuery, wire.AuditPage, MANAGE, "audit", people.audit, "List entries of the audit, newest first."),
)

SERVER = (
    Route("GET", "/v1/status", wire.Nothing, wire.StatusOut, OWN, "organization", server.status, "Count runs, points and bytes of the whole hub."),
    Route("GET", "/alive", wire.Nothing, wire.Health, NONE, "server", server.alive, "Tell that the process lives."),
    Route("GET", "/ready", wire.Nothing, wire.Health, NONE, "server", server.ready, "Tell that the database answers."),
)
# fmt: on

ROUTES: tuple[Route, ...] = (*EXPERIMENTS, *RUNS, *MODELS, *POOLS, *JOBS, *SWEEPS, *HPO, *PEOPLE, *SERVER)
