"""Importance of the parameters of a sweep, by Optuna where the server has it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..model.access import Actor
from ..model.refusal import Reason, Refusal
from ..model.sweeps import Direction, TrialState

if TYPE_CHECKING:
    from .sweeps import Sweeps

MOST_TRIALS = 2_000
"""Trials, the newest ones, that importances are taken from: the time grows with them."""
LEAST_TRIALS = 4
_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Importance of each parameter for one objective.

    Attributes:
        parts: Parameter -> its part of 1; empty if it cannot be told.
        reason: Why it cannot be told; empty otherwise.
        trials: Trials that it was taken from.
    """

    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    trials: int = 0


class Importances:
    """Computes importances, one at a time, and keeps the last ones until their sweep changes."""

    def __init__(self, sweeps: Sweeps) -> None:
        self._sweeps = sweeps
        self._one = asyncio.Lock()
        self._known: dict[tuple[int, int, int], Importance] = {}

    async def importance(self, actor: Actor, sweep: int, objective: int = 0) -> Importance:
        """Return the importance of the parameters of a sweep for one of its objectives.

        Args:
            actor: Who asks.
            sweep: Number of the sweep.
            objective: Number of the objective, from 0.
        """
        found = await self._sweeps.sweep(actor, sweep)
        if objective >= len(found.directions):
            raise Refusal(
                Reason.INVALID,
                f"objective={objective}: the sweep has {len(found.directions)}; count from 0",
                field="objective",
            )
        if find_spec("optuna") is None:
            return Importance(reason="Optuna is not installed on the hub's server; install skyward[hpo] there")
        async with self._one:
            key = (sweep, objective, found.version)
            if key not in self._known:
                trials = await self._completed(actor, sweep, objective)
                direction = found.directions[objective]
                self._known[key] = await asyncio.to_thread(_importance, trials, direction)
                while len(self._known) > _KEPT:
                    del self._known[next(iter(self._known))]
            return self._known[key]

    async def _completed(self, actor: Actor, sweep: int, objective: int) -> list[tuple[float, Mapping[str, Any]]]:
        """Return value and parameters of the newest completed trials."""
        since, found = 0, {}
        while True:
            changes = await self._sweeps.changes(actor, sweep, since)
            for trial in changes.trials:
                if trial.state is TrialState.COMPLETED and trial.values is not None:
                    found[trial.number] = (trial.values[objective], trial.params)
            if changes.is_complete:
                break
            since = changes.version
        newest = [found[number] for number in sorted(found)[-MOST_TRIALS:]]
        return [(value, params) for value, params in newest if math.isfinite(value)]


def _importance(trials: list[tuple[float, Mapping[str, Any]]], direction: Direction) -> Importance:
    if len(trials) < LEAST_TRIALS:
        return Importance(reason=f"It takes {LEAST_TRIALS} completed trials to tell", trials=len(trials))
    from optuna.distributions import json_to_distribution
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    from optuna.storages import InMemoryStorage
    from optuna.study import Study, StudyDirection
    from optuna.trial import create_trial

    storage = InMemoryStorage()
    storage.create_new_study([StudyDirection[direction.value.upper()]], "sweep")
    study = Study(study_name="sweep", storage=storage)
    for value, params in trials:
        distributions = {name: json_to_distribution(one.distribution) for name, one in params.items()}
        plain = {name: distributions[name].to_external_repr(one.value) for name, one in params.items()}
        study.add_trial(create_trial(value=value, params=plain, distributions=distributions))
    try:
        # It needs no scikit-learn, and takes a tenth of the time of the others.
        parts = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    except (ValueError, RuntimeError) as error:  # parameters that no two trials share, or that never vary
        return Importance(reason=f"Optuna cannot tell: {error}", trials=len(trials))
    if not parts:
        return Importance(reason="All completed trials have no parameter in common that varies", trials=len(trials))
    return Importance(parts={name: part for name, part in parts.items() if math.isfinite(part)}, trials=len(trials))
