"""Start of sweeps: `hub.sweep`."""

from __future__ import annotations

import json
import math
import os
import secrets
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ...accelerators import Accelerator
from ...calls.compute import as_compute
from ...calls.pending import ComputeFunction
from ...errors import MissingDependency, UsageError
from ..client.connection import HubConnection, path_of
from ..client.fluent import current_experiment, current_spool
from ..client.jobs import submit
from ..client.names import random_name
from ..client.reading import needed_address
from ..client.settings import Address
from ..client.trial import Trial
from ..model.refusal import Refusal
from ..model.sweep_config import SweepConfig, parse_config
from .plans import check_root
from .records import ENDS, Sweep

if TYPE_CHECKING:
    from ...pool.pool import ComputePool


def sweep(  # noqa: PLR0913  # keyword-only options
    objective: Callable[[Trial], Any],
    space: Mapping[str, Any],
    *,
    name: str | None = None,
    metric: str | Sequence[str] = "objective",
    direction: str | Sequence[str] = "minimize",
    strategy: str = "bayesian",
    max_trials: int | None = None,
    max_concurrent_trials: int | None = None,
    pruner: str | Mapping[str, Any] | None = None,
    early_stopping: Mapping[str, Any] | None = None,
    base_config: Mapping[str, Any] | None = None,
    resources_per_trial: Mapping[str, Any] | None = None,
    population: Mapping[str, Any] | None = None,
    strategy_options: Mapping[str, Any] | None = None,
    warm_start: Iterable[str | Sweep] = (),
    seed: int | None = None,
    experiment: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    save_stopped: bool = False,
    timeout_s: float | None = None,
    trial_retries: int = 3,
    pool: ComputePool | None = None,
    on: Literal["pool", "jobs"] = "pool",
    project: str | None = None,
    **job: Any,
) -> Sweep:
    """Search for parameters with which an objective is best.

    With `pool`, the trials are calls to that pool, and this waits until the sweep is over. Without, the sweep is a job
    of the hub, and this returns at once: it goes on without this program, and `hub.sweeps(name)` finds it again. The
    same name goes on with the same sweep: trials that are over are kept, and those that ran when their driver died
    begin again, or go on if they are jobs.

    Args:
        objective: Function of a `Trial`. It returns the value of the objective, a list or dictionary with one for each,
            or None for its last report. With `@sky.compute`, its options and integrations count.
        space: Name of a parameter -> {"type": "uniform", "log_uniform", "int_uniform" or "int_log_uniform", "min",
            "max"}, or {"type": "choice", "values"}. A list is a choice.
        name: Name of the sweep, unique in its project. None: a random one.
        metric: Name of the objective. `HubLogger` reports the metric of this name. A list for several.
        direction: "minimize" or "maximize"; a list for several objectives.
        strategy: "grid", "random", "bayesian" (TPE), "gp", "cma-es", "qmc", "nsga-ii" or "pbt".
        max_trials: Trials, with those that fail. None: the whole grid or population, otherwise 20.
        max_concurrent_trials: Trials at once. None: as many as the pool has room for, at most 8.
        pruner: Name of a pruner, or {"type": name, option: value}: "median", "percentile", "asha", "hyperband",
            "threshold" or "wilcoxon". It stops trials that are worse than others.
        early_stopping: {"patience", "min_delta"}: a trial stops after `patience` reports without an improvement of
            more than `min_delta`. Its value counts.
        base_config: Parameters that all trials share.
        resources_per_trial: {"gpus", "gpu_type", "cpus", "memory", "nodes"} of each trial; memory in GiB.
        population: Options of "pbt": size, ready_interval, generations, truncation, resample, factors,
            is_synchronous.
        strategy_options: Options of Optuna's sampler, by its names.
        warm_start: Earlier sweeps of the project, or their names, whose completed trials the strategy knows.
        seed: Seed. With it, and one trial at a time, the trials are the same again. None: a random one, which is kept.
        experiment: Experiment of the runs. None: that of `hub.set_experiment`, or of the environment.
        checkpoint_dir: Folder or URL of the trials' folders, which all nodes see. None: `SKYWARD_CHECKPOINT_DIR`.
        save_stopped: Whether a training with `HubLogger` saves a checkpoint when its trial is stopped.
        timeout_s: Seconds after which no trial begins, and the running ones are stopped.
        trial_retries: Further starts of a trial whose node was lost.
        pool: Pool of the trials, which is open. None: a pool of a job.
        on: "pool": trials are calls to one pool. "jobs": each is a job, preemptible and of low priority, and the job of
            the sweep holds no machines.
        project: Project of the hub. None: the token's.
        job: Options of `hub.submit` for the job, or for each trial's: nodes, accelerator, image, priority and others.

    Raises:
        UsageError: An option is not legal, or another program runs the sweep.
        HubError: The hub refuses the sweep, or does not answer.

    Example:
        from skyward import hub

        def objective(trial: hub.Trial) -> float:
            return (trial["x"] - 2) ** 2

        sweep = hub.sweep(objective, {"x": {"type": "uniform", "min": -10, "max": 10}}, max_trials=50, pool=pool)
        print(sweep.best.params)
    """
    names, directions = ([item] if isinstance(item, str) else list(item) for item in (metric, direction))
    if len(names) != len(directions):
        raise UsageError(
            f"direction={direction!r}: does not fit {len(names)} metrics; pass one for each", field="direction"
        )
    body = {
        "search_space": dict(space),
        "strategy": strategy,
        "strategy_options": strategy_options,
        "objective": [{"metric": item, "direction": way} for item, way in zip(names, directions, strict=True)],
        "max_trials": max_trials,
        "max_concurrent_trials": max_concurrent_trials,
        "pruner": pruner,
        "early_stopping": early_stopping,
        "base_config": base_config,
        "resources_per_trial": resources_per_trial,
        "population": population,
        "warm_start": [item.name if isinstance(item, Sweep) else item for item in warm_start],
        "seed": seed,
        "experiment": experiment or current_experiment(),
        "checkpoint_dir": None if checkpoint_dir is None else os.fspath(checkpoint_dir),
        "save_stopped": save_stopped,
        "timeout_s": timeout_s,
        "trial_retries": trial_retries,
    }
    given = {key: value for key, value in body.items() if value is not None}
    return start_sweep(objective, name, given, pool=pool, on=on, project=project, job=job)


def start_sweep(
    objective: Callable[[Trial], Any],
    name: str | None,
    config: Mapping[str, Any],
    *,
    pool: ComputePool | None = None,
    on: str = "pool",
    project: str | None = None,
    job: Mapping[str, Any] | None = None,
) -> Sweep:
    """Start a sweep by its configuration, in the words of YAML. See `sweep`."""
    if on not in ("pool", "jobs") or (on == "jobs" and pool is not None):
        raise UsageError(f"on={on!r}: is not possible here; use 'pool', or 'jobs' without pool=", field="on", value=on)
    address = needed_address("sweeps")
    address = address if project is None else replace(address, project=project)
    chosen = name or f"sweep-{random_name()}"
    checked = _checked({**config, "seed": config.get("seed", _known_seed(address, chosen))})
    function = as_compute(objective)
    if pool is not None and job:
        raise UsageError(f"{next(iter(job))}: is an option of a job, and pool= is given; leave one of them out")
    if pool is None and function.options.nodes is not None and checked.resources_per_trial.nodes is None:
        wanted = replace(checked.resources_per_trial, nodes=function.options.nodes)
        checked = replace(checked, resources_per_trial=wanted)
    if pool is None:
        _check_absolute(checked.checkpoint_dir)
    if on == "jobs":
        check_root(checked, checked.checkpoint_dir)
    trials: Literal["calls", "jobs"] = "jobs" if on == "jobs" else "calls"
    options = {} if pool is not None else _job_options(address, checked, job or {}, trials)
    row = _open(address, chosen, checked)
    if row["status"] in ENDS:
        return Sweep(address, row)
    if pool is not None:
        _drive(address, row, checked, function, pool)
    elif row["status"] == "interrupted":
        _submit(row, function, options, trials)
    return Sweep(address, row)


def sweeps(name: str | None = None, *, project: str | None = None, limit: int = 100) -> list[Sweep]:
    """Return the sweeps of a project, the newest first; with a name, only that one.

    Args:
        name: Name of a sweep. None: all.
        project: Project of the hub. None: the token's.
        limit: Greatest number.

    Raises:
        HubError: The hub does not answer.

    Example:
        from skyward import hub

        for sweep in hub.sweeps():
            print(sweep.name, sweep.status)
    """
    address = needed_address("sweeps")
    address = address if project is None else replace(address, project=project)
    if name is not None:
        return [Sweep(address, row) for row in _studies(address, name)]
    return [Sweep(address, row) for row in sweep_rows(project=project, limit=limit)]


def sweep_rows(*, project: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
    """Return sweeps as the API shows them, the newest first."""
    address = needed_address("sweeps")
    with HubConnection(address if project is None else replace(address, project=project)) as connection:
        return list(connection.json("GET", "/v1/hpo", query={"limit": limit})["sweeps"])


def sweep_row(sweep_id: str, *, project: str | None = None) -> tuple[Sweep, dict[str, Any]]:
    """Return a sweep by its number or its name, also as the API shows it."""
    address = needed_address("sweeps")
    address = address if project is None else replace(address, project=project)
    if not sweep_id.isdigit():
        found = _studies(address, sweep_id)
        if not found:
            raise UsageError(f"sweep={sweep_id!r}: no such sweep in this project; see `skyward hpo list`")
        sweep_id = str(found[0]["id"])
    with HubConnection(address) as connection:
        row = connection.json("GET", path_of("v1", "hpo", sweep_id))
    return Sweep(address, row), row


# Within ---------------------------------------------------------------------------------------------------------------


def _checked(config: Mapping[str, Any]) -> SweepConfig:
    try:
        return parse_config(config)
    except Refusal as error:
        raise UsageError(error.message, field=error.field or "config") from None


def _check_absolute(checkpoint_dir: str | None) -> None:
    """Check that the folder is the same one for all jobs: each has a working folder of its own. Raises UsageError."""
    if checkpoint_dir is not None and "://" not in checkpoint_dir and not os.path.isabs(checkpoint_dir):
        raise UsageError(
            f"checkpoint_dir={checkpoint_dir!r}: jobs have other working folders; pass an absolute path, or a URL",
            field="checkpoint_dir",
        )


def _known_seed(address: Address, name: str) -> int:
    """Return the seed of the sweep of that name, so that it goes on; a random one if there is none."""
    for row in _studies(address, name):
        config = row["system_attrs"].get("skyward:config")
        if config is not None:
            return int(json.loads(config)["seed"])
    return secrets.randbits(32)


def _studies(address: Address, name: str) -> list[dict[str, Any]]:
    with HubConnection(address) as connection:
        return list(connection.json("GET", "/v1/sweeps", query={"name": name})["sweeps"])


def _open(address: Address, name: str, config: SweepConfig) -> dict[str, Any]:
    body = {"name": name, "key": uuid.uuid4().hex, "config": config.as_dict()}
    with HubConnection(address) as connection:
        return dict(connection.json("POST", "/v1/hpo", body))


def _submit(
    row: Mapping[str, Any],
    function: ComputeFunction[..., Any],
    options: Mapping[str, Any],
    trials: Literal["calls", "jobs"],
) -> None:
    """Let a job run the sweep."""
    # The driver gives each call its nodes, and takes the other options from here.
    call = function.with_options(nodes=None)(None)
    submit(call, sweep=row["id"], trials=trials, **{"name": str(row["name"])[:100], **options})


def _job_options(address: Address, config: SweepConfig, job: Mapping[str, Any], trials: str) -> dict[str, Any]:
    """Return options of `hub.submit`: those that were given, and what fits a sweep."""
    for option in ("key", "on", "sweep", "trials"):
        if option in job:
            raise UsageError(f"{option}={job[option]!r}: is no option of a sweep; leave it out", field=option)
    resources = config.resources_per_trial
    defaults: dict[str, Any] = {
        "nodes": resources.nodes or 1,
        "accelerator": resources.gpu_type,
        "type": "training",
        "priority": "low",
        "preemptible": True,
        "project": address.project,
    }
    if trials == "jobs":  # each has the machines of its own resources
        if resources.gpus is not None and resources.gpu_type is not None:
            defaults["accelerator"] = Accelerator.from_name(resources.gpu_type, count=math.ceil(resources.gpus))
        elif resources.gpus is not None and "accelerator" not in job:
            raise UsageError(
                f"resources_per_trial.gpus={resources.gpus:g}: a job counts devices of one type; pass gpu_type too",
                field="resources_per_trial.gpu_type",
            )
        defaults |= {
            "vcpus": None if resources.cpus is None else math.ceil(resources.cpus),
            "memory_gib": resources.memory,
            "on": "one" if job.get("nodes", defaults["nodes"]) == 1 else "all",
        }
    return {**defaults, **job}


def _drive(
    address: Address,
    row: Mapping[str, Any],
    config: SweepConfig,
    function: ComputeFunction[..., Any],
    pool: ComputePool,
) -> None:
    """Run the sweep in a pool of this program."""
    with _optuna_needed():
        from .local import drive_in_pool
    drive_in_pool(address, row, config, function, pool, spool=current_spool())


@contextmanager
def _optuna_needed() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependency("sweep: needs Optuna here; pip install 'skyward[hpo]'", name=error.name) from error
