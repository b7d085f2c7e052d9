"""Configuration of a sweep: the space that it searches, how it chooses parameters, and when trials and it end."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from .refusal import Reason, Refusal

STRATEGIES = ("grid", "random", "bayesian", "gp", "cma-es", "qmc", "nsga-ii", "pbt")
"""Ways to choose parameters. `bayesian` is TPE."""
PRUNERS: Mapping[str, Mapping[str, str]] = {
    "median": {"startup_trials": "n_startup_trials", "warmup_steps": "n_warmup_steps", "interval": "interval_steps"},
    "percentile": {
        "percentile": "percentile",
        "startup_trials": "n_startup_trials",
        "warmup_steps": "n_warmup_steps",
        "interval": "interval_steps",
    },
    "asha": {"min_steps": "min_resource", "reduction": "reduction_factor", "skip_rungs": "min_early_stopping_rate"},
    "hyperband": {"min_steps": "min_resource", "max_steps": "max_resource", "reduction": "reduction_factor"},
    "threshold": {
        "lower": "lower",
        "upper": "upper",
        "warmup_steps": "n_warmup_steps",
        "interval": "interval_steps",
    },
    "wilcoxon": {"p_threshold": "p_threshold", "startup_steps": "n_startup_steps"},
}
"""Pruner -> its options -> their names in Optuna."""
MOST_TRIALS = 100_000
_INTEGERS, _LOGARITHMIC = ("int_uniform", "int_log_uniform"), ("log_uniform", "int_log_uniform")
_RANGES = ("uniform", *_LOGARITHMIC, "int_uniform")
_UNITS = {"": 1.0, "g": 1.0, "gi": 1.0, "gib": 1.0, "gb": 1e9 / 2**30, "m": 2**-10, "mi": 2**-10, "mib": 2**-10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A parameter of a search space.

    Attributes:
        type: "uniform", "log_uniform", "int_uniform", "int_log_uniform" or "choice".
        min: Lowest value of a range.
        max: Highest value of a range, included.
        step: Distance of two values; only for "uniform" and "int_uniform".
        values: Values of a choice: texts, numbers, booleans or None.
    """

    type: str
    min: float | None = None
    max: float | None = None
    step: float | None = None
    values: Sequence[Any] = ()

    @property
    def is_integer(self) -> bool:
        return self.type in _INTEGERS

    @property
    def is_logarithmic(self) -> bool:
        return self.type in _LOGARITHMIC

    def grid(self) -> list[Any] | None:
        """Return all values; None where there are infinitely many."""
        if self.type == "choice":
            return list(self.values)
        step = self.step or (1 if self.type == "int_uniform" else None)
        if step is None or self.min is None or self.max is None:
            return None
        count = math.floor((self.max - self.min) / step + 1e-9) + 1
        return [self.min + index * step for index in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """An objective: the name of a metric, and whether it is minimized or maximized."""

    metric: str = "objective"
    direction: str = "minimize"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPatience:
    """End of a trial that no longer improves.

    Attributes:
        patience: Reports without an improvement after which a trial stops.
        min_delta: An improvement is larger than this.
    """

    patience: int
    min_delta: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResources:
    """Resources of a trial; None: a slot of the pool.

    Attributes:
        gpus: Devices, or a fraction of one.
        gpu_type: Accelerator of the pool's nodes.
        cpus: Processors.
        memory: Memory in GiB.
        nodes: Nodes of a trial that is a gang.
    """

    gpus: float | None = None
    gpu_type: str | None = None
    cpus: float | None = None
    memory: float | None = None
    nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationOptions:
    """Options of population based training.

    Attributes:
        size: Members, which train side by side.
        ready_interval: Steps of a member between two comparisons with the others.
        generations: Intervals of each member.
        truncation: Part of the population that copies from the best part, which is as large.
        resample: Probability that a copied parameter is drawn again instead of perturbed.
        factors: Factors of a perturbation, of which one is chosen. A choice moves to a neighbour.
        is_synchronous: Whether all members reach an interval before any of them goes on.
    """

    size: int = 8
    ready_interval: int = 1
    generations: int = 10
    truncation: float = 0.25
    resample: float = 0.25
    factors: Sequence[float] = (0.8, 1.25)
    is_synchronous: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """Configuration of a sweep, in the words of its YAML form.

    Attributes:
        search_space: Name of a parameter -> its dimension.
        strategy: One of `STRATEGIES`.
        strategy_options: Options of Optuna's sampler, by its names.
        objective: Goals; more than one only with strategies that trade them off.
        max_trials: Trials, with those that fail. None: the whole grid, the whole population, or 20.
        max_concurrent_trials: Trials at once. None: as many as the pool has room for, and at most 8.
        pruner: {"type": one of `PRUNERS`, option: value}; None: no trial is pruned.
        early_stopping: End of trials that no longer improve.
        base_config: Parameters that all trials share.
        experiment: Experiment of the runs.
        warm_start: Names of earlier sweeps whose completed trials the strategy knows from the start.
        resources_per_trial: Resources of a trial.
        population: Options of `pbt`.
        seed: Seed of all choices.
        trial_retries: Starts of a trial whose node was lost, beside the first one.
        checkpoint_dir: Folder or URL of the trials' folders, which all nodes see.
        save_stopped: Whether a training that is stopped early saves a checkpoint.
        timeout_s: Seconds after which no trial begins, and the running ones are stopped.
    """

    search_space: Mapping[str, Dimension]
    strategy: str = "bayesian"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    objective: Sequence[Goal] = (Goal(),)
    max_trials: int | None = None
    max_concurrent_trials: int | None = None
    pruner: Mapping[str, Any] | None = None
    early_stopping: StopPatience | None = None
    base_config: Mapping[str, Any] = field(default_factory=dict)
    experiment: str | None = None
    warm_start: Sequence[str] = ()
    resources_per_trial: TrialResources = TrialResources()
    population: PopulationOptions | None = None
    seed: int = 0
    trial_retries: int = 3
    checkpoint_dir: str | None = None
    save_stopped: bool = False
    timeout_s: float | None = None

    @property
    def trials(self) -> int:
        """Number of trials at most."""
        if self.strategy == "grid":
            size = math.prod(len(dimension.grid() or ()) for dimension in self.search_space.values())
            return min(size, self.max_trials or size)
        if self.population is not None:
            size = self.population.size * self.population.generations
            return min(size, self.max_trials or size)
        return self.max_trials or 20

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data, which `parse_config` reads."""
        body = asdict(self)
        body["search_space"] = {
            name: {key: value for key, value in dimension.items() if value not in (None, ())}
            for name, dimension in body["search_space"].items()
        }
        return {key: value for key, value in body.items() if value is not None}

    def search_of(self) -> dict[str, Any]:
        """Return the parts that never change in the life of a sweep: all but its limits and its places."""
        limits = {"max_trials", "max_concurrent_trials", "timeout_s", "trial_retries", "resources_per_trial"}
        places = {"experiment", "checkpoint_dir", "save_stopped"}
        return {key: value for key, value in self.as_dict().items() if key not in limits | places}


def parse_config(body: Mapping[str, Any]) -> SweepConfig:
    """Make a configuration from plain data, and check all of it.

    Raises:
        Refusal: A field is unknown, or its value is not legal.

    Example:
        >>> config = parse_config({"search_space": {"lr": {"type": "log_uniform", "min": 1e-5, "max": 0.1}}})
        >>> config.strategy, config.trials
        ('bayesian', 20)
    """
    given = _object("config", body, SweepConfig.__dataclass_fields__)
    space = given.get("search_space")
    if not isinstance(space, Mapping) or not space:
        _refuse(
            "search_space", space, "has no parameter; write a name and its type, such as {lr: {type: uniform, ...}}"
        )
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    values["search_space"] = {_name(name): _dimension(f"search_space.{name}", item) for name, item in space.items()}
    values["strategy"] = _one_of("strategy", given.get("strategy") or "bayesian", STRATEGIES)
    values["objective"] = _goals(given.get("objective"))
    values["early_stopping"] = _early_stopping(given.get("early_stopping"))
    values["pruner"] = _pruner(given.get("pruner"))
    values["resources_per_trial"] = _resources(given.get("resources_per_trial"))
    values["population"] = _population(given.get("population"), values["strategy"])
    for name, least in (("max_trials", 1), ("max_concurrent_trials", 1), ("trial_retries", 0), ("seed", 0)):
        if name in values:
            values[name] = _integer(name, values[name], least, 2**63 if name == "seed" else MOST_TRIALS)
    if "timeout_s" in values:
        values["timeout_s"] = _number("timeout_s", values["timeout_s"], least=0.0)
    if "warm_start" in values:
        if not isinstance(values["warm_start"], list | tuple) or not all(
            isinstance(name, str) for name in values["warm_start"]
        ):
            _refuse("warm_start", values["warm_start"], "is no list of names; write the names of sweeps")
        values["warm_start"] = tuple(values["warm_start"])
    for name in ("base_config", "strategy_options"):
        if name in values and not isinstance(values[name], Mapping):
            _refuse(name, values[name], "is no object; write names and values")
    return _consistent(SweepConfig(**values))


def _consistent(config: SweepConfig) -> SweepConfig:
    """Check that the parts of a configuration fit each other."""
    shared = sorted(set(config.base_config) & set(config.search_space))
    if shared:
        _refuse("base_config", shared[0], "is searched too; leave it out of one of the two")
    if config.strategy == "grid":
        for name, dimension in config.search_space.items():
            if dimension.grid() is None:
                _refuse(f"search_space.{name}", dimension.type, "has no grid; use a choice, or give it a step")
    if config.warm_start and config.strategy in ("grid", "pbt"):
        _refuse("warm_start", config.warm_start[0], f"does not go with {config.strategy}; leave it out")
    if len(config.objective) > 1:
        if config.strategy in ("cma-es", "pbt"):
            _refuse("strategy", config.strategy, "has one objective; use nsga-ii, bayesian or random for several")
        if config.pruner or config.early_stopping:
            _refuse("pruner", "...", "needs a single objective; leave pruner and early_stopping out")
    if config.strategy == "pbt" and (config.pruner or config.early_stopping):
        _refuse("pruner", "...", "does not go with pbt, which replaces members; leave pruner and early_stopping out")
    return config


# Parts ----------------------------------------------------------------------------------------------------------------


def _dimension(field: str, body: Any) -> Dimension:
    if isinstance(body, list | tuple):
        body = {"type": "choice", "values": list(body)}
    given = _object(field, body, Dimension.__dataclass_fields__)
    kind = _one_of(f"{field}.type", given.get("type"), (*_RANGES, "choice"))
    if kind == "choice":
        return _choice(field, given)
    if given.get("values"):
        _refuse(f"{field}.values", "...", f"is for a choice; a {kind} has min and max")
    names = ("min", "max") if given.get("step") is None else ("min", "max", "step")
    limits = {name: _limit(f"{field}.{name}", given.get(name), kind) for name in names}
    if limits["min"] >= limits["max"]:
        _refuse(f"{field}.min", limits["min"], f"is not below max={limits['max']}; swap or widen them")
    if kind in _LOGARITHMIC and limits["min"] <= 0:
        _refuse(f"{field}.min", limits["min"], f"is not above 0, as a {kind} needs it; raise it")
    if "step" in limits and (kind in _LOGARITHMIC or limits["step"] <= 0):
        _refuse(f"{field}.step", limits["step"], "must be above 0; set it for uniform and int_uniform only")
    return Dimension(type=kind, min=limits["min"], max=limits["max"], step=limits.get("step"))


def _limit(field: str, value: Any, kind: str) -> float:
    number = _number(field, value)
    if kind in _INTEGERS and number != int(number):
        _refuse(field, number, f"is no whole number; use one for {kind}")
    return int(number) if kind in _INTEGERS else number


def _choice(field: str, given: Mapping[str, Any]) -> Dimension:
    values = given.get("values")
    if not isinstance(values, list | tuple) or not values:
        _refuse(f"{field}.values", values, "is no list of values; write at least one")
    for value in values:
        if not (value is None or isinstance(value, str | int | float | bool)):
            _refuse(f"{field}.values", value, "is no text, number, boolean or null; choose a name and look it up")
    if len({(type(value), value) for value in values}) < len(values):
        _refuse(f"{field}.values", list(values), "has a value twice; leave one out")
    for name in ("min", "max", "step"):
        if given.get(name) is not None:
            _refuse(f"{field}.{name}", given[name], "is for ranges; a choice has values")
    return Dimension(type="choice", values=tuple(values))


def _goals(body: Any) -> tuple[Goal, ...]:
    if body is None:
        return (Goal(),)
    items = body if isinstance(body, list | tuple) else [body]
    goals = []
    for item in items:
        given = _object("objective", item, Goal.__dataclass_fields__)
        direction = _one_of("objective.direction", given.get("direction") or "minimize", ("minimize", "maximize"))
        metric = given.get("metric") or "objective"
        if not isinstance(metric, str):
            _refuse("objective.metric", metric, "is no text; write the name of a metric")
        goals.append(Goal(metric=metric, direction=direction))
    if not goals or len({goal.metric for goal in goals}) < len(goals):
        _refuse("objective", body, "needs metrics of different names; name each once")
    return tuple(goals)


def _early_stopping(body: Any) -> StopPatience | None:
    if body is None:
        return None
    given = _object("early_stopping", body, StopPatience.__dataclass_fields__)
    patience = _integer("early_stopping.patience", given.get("patience"), 1, 10**9)
    return StopPatience(
        patience=patience, min_delta=_number("early_stopping.min_delta", given.get("min_delta", 0.0), least=0.0)
    )


def _pruner(body: Any) -> dict[str, Any] | None:
    if body is None:
        return None
    given = {"type": body} if isinstance(body, str) else dict(_object("pruner", body, None))
    kind = _one_of("pruner.type", given.get("type"), tuple(PRUNERS))
    _object("pruner", given, ("type", *PRUNERS[kind]))
    for name, value in given.items():
        if name != "type" and value != "auto":
            _number(f"pruner.{name}", value)
    if kind == "percentile" and "percentile" not in given:
        _refuse("pruner.percentile", None, "is missing; write the part of the trials to keep, from 0 to 100")
    if kind == "threshold" and not {"lower", "upper"} & set(given):
        _refuse("pruner.lower", None, "is missing; write lower, upper or both")
    return given


def _resources(body: Any) -> TrialResources:
    given = dict(_object("resources_per_trial", body or {}, TrialResources.__dataclass_fields__))
    if given.get("memory") is not None:
        given["memory"] = _memory(given["memory"])
    for name in ("gpus", "cpus"):
        if given.get(name) is not None:
            given[name] = _number(f"resources_per_trial.{name}", given[name], least=0.0)
    if given.get("nodes") is not None:
        given["nodes"] = _integer("resources_per_trial.nodes", given["nodes"], 1, 10_000)
    return TrialResources(**given)


def _population(body: Any, strategy: str) -> PopulationOptions | None:
    if strategy != "pbt":
        if body is not None:
            _refuse("population", "...", "is for strategy=pbt; choose it, or leave population out")
        return None
    given = dict(_object("population", body or {}, PopulationOptions.__dataclass_fields__))
    for name, least in (("size", 2), ("ready_interval", 1), ("generations", 1)):
        if name in given:
            given[name] = _integer(f"population.{name}", given[name], least, MOST_TRIALS)
    for name, most in (("truncation", 0.5), ("resample", 1.0)):
        if name in given:
            given[name] = _number(f"population.{name}", given[name], least=0.0, most=most)
    if "factors" in given:
        factors = given["factors"]
        if not isinstance(factors, list | tuple) or not factors:
            _refuse("population.factors", factors, "is no list of numbers; write such as [0.8, 1.25]")
        given["factors"] = tuple(_number("population.factors", factor) for factor in factors)
    return PopulationOptions(**given)


# Values ---------------------------------------------------------------------------------------------------------------


def _object(field: str, body: Any, known: Collection[str] | None) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        _refuse(field, body, "is no object; write names and values")
    for name in body:
        if known is not None and name not in known:
            near = difflib.get_close_matches(str(name), list(known), n=1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            _refuse(f"{field}.{name}", body[name], f"is unknown; {hint}")
    return body


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name or len(name) > 250:
        _refuse("search_space", name, "is no name of a parameter; write 1 to 250 characters")
    return name


def _one_of(field: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        _refuse(field, value, f"is unknown; {hint}")
    return str(value)


def _integer(field: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _refuse(field, value, f"is no whole number from {least} to {most}; write one")
    return value


def _number(field: str, value: Any, *, least: float = -math.inf, most: float = math.inf) -> float:
    if isinstance(value, str):  # YAML reads 1e-5 as a text
        try:
            value = float(value)
        except ValueError:
            _refuse(field, value, "is no number; write one")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(field, value, "is no number; write one")
    if not least <= value <= most:
        _refuse(field, value, f"is out of range; write a number from {least:g} to {most:g}")
    return value


def _memory(value: Any) -> float:
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(value))
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        _refuse("resources_per_trial.memory", value, "is no size; write GiB, or such as 40Gi")
    return _number("resources_per_trial.memory", match[1], least=0.0) * unit


def _refuse(field: str, value: Any, problem: str) -> NoReturn:
    raise Refusal(Reason.INVALID, f"{field}={value!r:.80}: {problem}", field=field)
