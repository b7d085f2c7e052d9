"""Optuna's samplers, pruners and distributions for a configuration."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from ...errors import UsageError
from ..model.sweep_config import PRUNERS, Dimension, SweepConfig

_PRUNERS: Mapping[str, type[BasePruner]] = {
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "asha": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "threshold": optuna.pruners.ThresholdPruner,
    "wilcoxon": optuna.pruners.WilcoxonPruner,
}


class WholeGrid(optuna.samplers.GridSampler):
    """Grid of Optuna, whose end is the driver's matter: a study that is asked and told cannot be stopped."""

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Do nothing."""


def distributions_of(config: SweepConfig) -> dict[str, BaseDistribution]:
    """Return the distribution of each parameter."""
    return {name: _distribution(dimension) for name, dimension in config.search_space.items()}


def sampler_for(config: SweepConfig, number: int) -> BaseSampler:
    """Return the sampler that chooses the parameters of one trial.

    Each trial has its own, seeded by the sweep and its number. So a driver that goes on after the death of another one
    chooses as that one would have, and never the same again.

    Raises:
        UsageError: The sampler does not take its options, or lacks a package.
    """
    own = seed_of(config.seed, number)
    fallback = optuna.samplers.RandomSampler(seed=own)
    options = dict(config.strategy_options)
    try:
        with _quiet():
            match config.strategy:
                case "grid":
                    grid = {name: dimension.grid() or [] for name, dimension in config.search_space.items()}
                    return WholeGrid(grid, seed=config.seed % 2**32)
                case "random":
                    return fallback
                case "gp":
                    return optuna.samplers.GPSampler(seed=own, independent_sampler=fallback, **options)
                case "cma-es":
                    options = {"warn_independent_sampling": False, **options}
                    return optuna.samplers.CmaEsSampler(seed=own, independent_sampler=fallback, **options)
                case "qmc":
                    options = {"scramble": True, "warn_independent_sampling": False, **options}
                    # The sequence has one seed, and each trial takes the next point of it.
                    return optuna.samplers.QMCSampler(seed=config.seed % 2**32, independent_sampler=fallback, **options)
                case "nsga-ii":
                    return optuna.samplers.NSGAIISampler(seed=own, **options)
                case _:
                    # A trial that runs counts as a bad one meanwhile, so that several at once do not choose alike.
                    return optuna.samplers.TPESampler(seed=own, **{"constant_liar": True, **options})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"strategy_options={options!r:.80}: {config.strategy} does not take them ({error}); see Optuna's samplers",
            field="strategy_options",
        ) from error


def pruner_for(config: SweepConfig) -> BasePruner:
    """Return the pruner of a sweep.

    Raises:
        UsageError: The pruner does not take its options.
    """
    if config.pruner is None:
        return optuna.pruners.NopPruner()
    kind = config.pruner["type"]
    options = {PRUNERS[kind][name]: value for name, value in config.pruner.items() if name != "type"}
    try:
        with _quiet():
            return _PRUNERS[kind](**options)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"pruner={dict(config.pruner)!r:.80}: is not possible ({error}); change its options", field="pruner"
        ) from error


def seed_of(seed: int, number: int) -> int:
    """Return the seed of a trial: 32 bits that depend on the sweep's seed and on its number."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "little")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about parts of Optuna that may change: which ones are used is our choice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.type == "choice":
        return CategoricalDistribution(tuple(dimension.values))
    low, high = dimension.min, dimension.max
    assert low is not None
    assert high is not None
    if dimension.is_integer:
        step = 1 if dimension.step is None else int(dimension.step)
        return IntDistribution(int(low), int(high), log=dimension.is_logarithmic, step=step)
    return FloatDistribution(low, high, log=dimension.is_logarithmic, step=dimension.step)


def holds(dimension: Dimension, value: Any) -> bool:
    """Return whether a value is one of a dimension. A step does not matter."""
    if dimension.type == "choice":
        return value in dimension.values
    low, high = dimension.min or 0.0, dimension.max or 0.0
    return isinstance(value, int | float) and low <= value <= high


def suggested(trial: optuna.Trial, distributions: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Let a trial choose each parameter that it lacks, and return all of them."""
    chosen: dict[str, Any] = {}
    for name, kind in distributions.items():
        if isinstance(kind, CategoricalDistribution):
            chosen[name] = trial.suggest_categorical(name, kind.choices)
        elif isinstance(kind, IntDistribution):
            chosen[name] = trial.suggest_int(name, kind.low, kind.high, step=kind.step, log=kind.log)
        elif isinstance(kind, FloatDistribution):
            chosen[name] = trial.suggest_float(name, kind.low, kind.high, step=kind.step, log=kind.log)
    return chosen
