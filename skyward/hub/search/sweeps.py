"""`hub.sweep` and what it returns."""

from __future__ import annotations

import json
import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ...calls.compute import ComputeFunction, as_compute
from ...errors import JobFailed, MissingDependency, UsageError
from ..client.connection import HubConnection, path_of
from ..client.fluent import current_experiment, current_spool
from ..client.jobs import Job, submit
from ..client.names import random_name
from ..client.reading import needed_address
from ..client.registry import register
from ..client.settings import Address
from ..client.trial import Trial
from ..model.refusal import Refusal
from ..model.sweep_config import SweepConfig, parse_config

if TYPE_CHECKING:
    from ...pool.pool import ComputePool

ENDS = frozenset({"completed", "stopped", "failed"})
"""Statuses of a sweep that is over."""
_LOOK_S = 0.5
_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A trial of a sweep, as the hub has it.

    Attributes:
        number: Number in its sweep, from 0.
        state: "waiting", "running", "completed", "pruned" or "failed".
        params: Parameters that were chosen.
        values: Value of each objective; empty if there is none yet.
        run: Id of its run; None for one that was copied from an earlier sweep.
        error: Why it failed; None if it did not.
        stopped_by: "pruned", "patience" or "stopped"; None if nothing ended it early.

    Example:
        from skyward import hub

        for trial in hub.sweeps("digits")[0].trials:
            print(trial.number, trial.state, trial.params, trial.value)
    """

    number: int
    state: str
    params: Mapping[str, Any]
    values: Sequence[float] = ()
    run: str | None = None
    error: str | None = None
    stopped_by: str | None = None

    @property
    def value(self) -> float | None:
        """Value of the first objective; None if there is none yet."""
        return self.values[0] if self.values else None


class Sweep:
    """A search for good parameters: its progress, its trials, and the best one. `hub.sweep` returns it.

    Each property asks the hub, from any process.

    Attributes:
        id: Its number.
        name: Its name, unique in the project.

    Example:
        from skyward import hub

        sweep = hub.sweeps("digits")[0]
        print(sweep.status, sweep.best.params, sweep.best.value)
    """

    def __init__(self, address: Address, body: Mapping[str, Any]) -> None:
        self.id = int(body["id"])
        self.name = str(body["name"])
        self._address = address

    def __repr__(self) -> str:
        return f"<Sweep {self.id} {self.name}>"

    @property
    def status(self) -> str:
        """State: "queued", "running", "interrupted", "completed", "stopped" or "failed"."""
        return str(self._body()["status"])

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration, in the words of its YAML form."""
        return dict(self._body()["config"])

    @property
    def run(self) -> str | None:
        """Id of its run, whose children are the runs of its trials; None before the first trial."""
        found = self._body()["run"]
        return None if found is None else str(found)

    @property
    def job(self) -> Job[Any] | None:
        """Job that runs it; None if a program does, with a pool of its own."""
        number = self._body()["job"]
        return None if number is None else self._job_of(number)

    @property
    def trials(self) -> list[TrialResult]:
        """Trials so far, in their order."""
        return list(self._trials())

    @property
    def best(self) -> TrialResult:
        """Completed trial with the best value. With several objectives, see `front`.

        Raises:
            UsageError: No trial is complete, or the sweep has several objectives.
        """
        body = self._body()
        if len(body["directions"]) > 1:
            raise UsageError(f"sweep={self.name!r}: has several objectives and no best trial; use front")
        if body["best"] is None:
            errors = [trial.error for trial in self._trials() if trial.error]
            why = f" The first one failed: {errors[0]}" if errors else ""
            raise UsageError(f"sweep={self.name!r}: no trial is complete; wait for one.{why}", field="sweep")
        return _result(body["best"])

    @property
    def front(self) -> list[TrialResult]:
        """Completed trials that no other one beats in every objective, in their order."""
        signs = [-1.0 if direction == "maximize" else 1.0 for direction in self._body()["directions"]]
        done = [trial for trial in self._trials() if trial.state == "completed" and trial.values]
        costs = [[sign * value for sign, value in zip(signs, trial.values, strict=True)] for trial in done]
        return [trial for trial, own in zip(done, costs, strict=True) if not any(_beats(cost, own) for cost in costs)]

    def wait(self, timeout: float | None = None) -> Sweep:
        """Wait until the sweep is over, and return it.

        Args:
            timeout: Longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: It is not over yet.
            JobFailed: Its job ended before it did.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (body := self._body())["status"] not in ENDS:
            if body["job"] is not None:
                job = self._job_of(body["job"])
                if job.done() and self._body()["status"] not in ENDS:
                    raise job.exception() or JobFailed(
                        f"sweep={self.name!r}: its job {job.id} has ended before it; start it again under its name",
                        url=self._address.url,
                        job=job.id,
                        state=job.status,
                    )
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"sweep={self.name!r}: is {body['status']} after {timeout:g} s")
            time.sleep(_LOOK_S)
        return self

    def stop(self) -> None:
        """Let the sweep end: no trial begins, and running ones stop at their next report."""
        self._send("POST", "cancel", {})

    def delete(self) -> None:
        """Delete the sweep with its trials for good. Their runs stay. Raises HubError if one may not."""
        with HubConnection(self._address) as connection:
            connection.json("DELETE", path_of("v1", "sweeps", str(self.id)))

    def register_best(self, name: str, artifact_path: str, tags: Mapping[str, object] | None = None) -> int:
        """Register an artifact of the best trial's run as a new version of a model, and return its number.

        Args:
            name: Name of the model; made if missing.
            artifact_path: Key of the artifact, or folder of artifacts.
            tags: Tags of the version; its sweep, trial and value are added.

        Raises:
            UsageError: No trial is complete, or its run has no such artifact.
            HubError: The hub refuses the model.
        """
        best = self.best
        if best.run is None:
            raise UsageError(f"sweep={self.name!r}: its best trial is of an earlier sweep; register it there")
        known = {"sweep": self.name, "trial": best.number, "value": best.value}
        with HubConnection(self._address) as connection:
            return register(connection, name, best.run, artifact_path, {**known, **(tags or {})})

    # Within -----------------------------------------------------------------------------------------------------------

    def _body(self) -> dict[str, Any]:
        return dict(self._send("GET"))

    def _send(self, method: str, *parts: str | Mapping[str, Any]) -> Any:
        names = [part for part in parts if isinstance(part, str)]
        body = next((part for part in parts if not isinstance(part, str)), None)
        with HubConnection(self._address) as connection:
            return connection.json(method, path_of("v1", "hpo", str(self.id), *names), body)

    def _job_of(self, number: str) -> Job[Any]:
        return Job(self._address, {"id": number, "name": self.name})

    def _trials(self) -> Iterator[TrialResult]:
        path, after = path_of("v1", "hpo", str(self.id), "trials"), -1
        with HubConnection(self._address) as connection:
            while rows := connection.json("GET", path, query={"after": after, "limit": _PAGE})["trials"]:
                yield from map(_result, rows)
                after = rows[-1]["number"]
                if len(rows) < _PAGE:
                    return


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
    on: Literal["pool"] = "pool",
    project: str | None = None,
    **job: Any,
) -> Sweep:
    """Search for parameters with which an objective is best.

    With `pool`, the trials are calls to that pool, and this waits until the sweep is over. Without, the sweep is one
    job of the hub with one pool, and this returns at once. The same name goes on with the same sweep: trials that are
    over are kept, and those that ran when their program died begin again.

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
        on: "pool": trials are calls to one pool.
        project: Project of the hub. None: the token's.
        job: Options of `hub.submit` for the job: nodes, accelerator, image, concurrency, priority and others.

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
    if on != "pool":
        raise UsageError(f"on={on!r}: unknown; use 'pool'", field="on", value=on)
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
    return start_sweep(objective, name, given, pool=pool, project=project, job=job)


def start_sweep(
    objective: Callable[[Trial], Any],
    name: str | None,
    config: Mapping[str, Any],
    *,
    pool: ComputePool | None = None,
    project: str | None = None,
    job: Mapping[str, Any] | None = None,
) -> Sweep:
    """Start a sweep by its configuration, in the words of YAML. See `sweep`."""
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
    row = _open(address, chosen, checked)
    if pool is None and row["status"] == "interrupted":
        _submit(address, row, checked, function, **(job or {}))
    if pool is not None and row["status"] not in ENDS:
        _drive(address, row, checked, function, pool)
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
    address: Address, row: Mapping[str, Any], config: SweepConfig, function: ComputeFunction[..., Any], **job: Any
) -> None:
    """Let a job run the sweep."""
    for option in ("key", "on", "sweep"):
        if option in job:
            raise UsageError(f"{option}: a sweep has none; leave it out", field=option)
    resources = config.resources_per_trial
    defaults = {
        "nodes": resources.nodes or 1,
        "accelerator": resources.gpu_type,
        "name": str(row["name"])[:100],
        "type": "training",
        "priority": "low",
        "preemptible": True,
    }
    # The driver gives each call its nodes, and takes the other options from here.
    call = function.with_options(nodes=None)(None)  # type: ignore[arg-type]
    submit(call, sweep=row["id"], project=address.project, **{**defaults, **job})


def _drive(
    address: Address,
    row: Mapping[str, Any],
    config: SweepConfig,
    function: ComputeFunction[..., Any],
    pool: ComputePool,
) -> None:
    """Run the sweep in a pool of this program."""
    try:
        from .local import drive_in_pool
    except ModuleNotFoundError as error:
        raise MissingDependency("pool=...: needs Optuna here; pip install 'skyward[hpo]'", name=error.name) from error
    drive_in_pool(address, row, config, function, pool, spool=current_spool())


def _result(row: Mapping[str, Any]) -> TrialResult:
    return TrialResult(
        number=row["number"],
        state=row["state"],
        params=dict(row["params"]),
        values=tuple(float(value) for value in row["values"] or ()),
        run=row["run"],
        error=row["error"],
        stopped_by=row["stopped_by"],
    )


def _beats(cost: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether a trial is nowhere worse than another one, and somewhere better."""
    return all(a <= b for a, b in zip(cost, other, strict=True)) and any(
        a < b for a, b in zip(cost, other, strict=True)
    )
