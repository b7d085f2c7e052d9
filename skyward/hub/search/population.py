"""Population based training: members train side by side, and bad ones go on from checkpoints of good ones.

A trial is one interval of one member, so nothing interrupts a training: a copy begins its next interval from another
member's folder. All decisions follow from the rows, and so does another driver's.

Source: Jaderberg and others, Population Based Training of Neural Networks, 2017.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from ..model.sweep_config import Dimension, PopulationOptions, SweepConfig
from .plans import STOPPED, TrialEnd, TrialPlan
from .samplers import distributions_of, seed_of

MEMBER, GENERATION, PARENT = "skyward:member", "skyward:generation", "skyward:parent"
"""Attributes of a trial: its member, the number of its interval, and the trial from whose folder it begins."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """An interval of a member.

    Attributes:
        parent: Number of the trial from whose folder it begins; None at the start.
        cost: Its value, with a sign so that lower is better; None if it has none.
    """

    id: int
    number: int
    member: int
    generation: int
    params: Mapping[str, Any]
    state: TrialState
    parent: int | None
    cost: float | None

    @property
    def is_complete(self) -> bool:
        return self.state is TrialState.COMPLETE and self.cost is not None


class PopulationSearch:
    """Search by a population.

    Args:
        storage: Storage of the sweep.
        name: Name of the sweep.
        config: Configuration, with `population`.
    """

    def __init__(self, storage: BaseStorage, name: str, config: SweepConfig) -> None:
        self._storage, self._config = storage, config
        self._options = config.population or PopulationOptions()
        self._id = storage.get_study_id_from_name(name)
        self._distributions = distributions_of(config)
        self._removed: set[int] = set()
        self._sign = -1.0 if config.objective[0].direction == "maximize" else 1.0

    def unfinished(self) -> Sequence[TrialPlan]:
        plans = []
        for row in self._rows():
            if row.state is TrialState.RUNNING:
                attempt = int(row.user_attrs.get("attempts", 1)) + 1
                self._storage.set_trial_user_attr(row._trial_id, "attempts", attempt)
                plans.append(self._plan(self._segment(row), str(row.user_attrs["run"]), attempt))
        return plans

    def ask(self) -> TrialPlan | None:
        segments = [self._segment(row) for row in self._rows()]
        if self._config.max_trials is not None and len(segments) >= self._config.max_trials:
            return None
        last = {segment.member: segment for segment in segments}  # in the order of their numbers
        for member in range(self._options.size):
            if member not in last:
                return self._begin(member, 0, self._draw(member), None)
        for segment in sorted(last.values(), key=lambda each: (each.generation, each.member)):
            if segment.state is TrialState.RUNNING:
                continue
            if segment.state is TrialState.PRUNED:  # the sweep was stopped under it
                return self._begin(segment.member, segment.generation, segment.params, segment.parent)
            plan = self._follow(segment, segments, last)
            if plan is not None:
                return plan
        return None

    def report(self, plan: TrialPlan, step: int, value: float) -> str:
        self._storage.set_trial_intermediate_value(plan.id, step, value)
        return ""

    def finish(self, plan: TrialPlan, end: TrialEnd) -> None:
        if self._storage.get_trial(plan.id).state.is_finished():
            return  # a driver that had lost its lease told it first
        error = end.error
        is_stopped = end.stopped_by == STOPPED
        if not error and not is_stopped and (end.values is None or math.isnan(end.values[0])):
            error = "objective: returned no number; return the value of the interval"
        if error:
            self._storage.set_trial_user_attr(plan.id, "error", error)
        if is_stopped:
            self._storage.set_trial_user_attr(plan.id, "stopped_by", STOPPED)
        state = TrialState.FAIL if error else TrialState.PRUNED if is_stopped else TrialState.COMPLETE
        values = [float(value) for value in end.values or ()] if state is TrialState.COMPLETE else None
        self._storage.set_trial_state_values(plan.id, state, values)

    # Rules ------------------------------------------------------------------------------------------------------------

    def _follow(self, segment: Segment, segments: Sequence[Segment], last: Mapping[int, Segment]) -> TrialPlan | None:
        """Return the next interval of a member whose last one is over; None while it waits, or if there is none."""
        generation = segment.generation
        if self._options.is_synchronous:
            rivals = [each for each in segments if each.generation == generation]
            reached = {each.member for each in segments if each.generation > generation}
            newest = {each.member: each for each in rivals}
            arrived = {member for member, each in newest.items() if each.state is not TrialState.RUNNING}
            if len(reached | arrived) < self._options.size:
                return None
        else:
            newest = {each.member: each for each in segments if each.is_complete}
        ranking = sorted((each for each in newest.values() if each.is_complete), key=_order)
        if segment.state is TrialState.FAIL:
            return self._replace(segment, ranking, last)
        if generation + 1 >= self._options.generations:
            return None
        count = self._part(len(ranking))
        good = [each for each in ranking[:count] if each.generation >= generation]  # never from one that is behind
        is_bad = segment in ranking[len(ranking) - count :] and segment not in ranking[:count]
        if is_bad and good:
            return self._copy(segment, good)
        return self._begin(segment.member, generation + 1, segment.params, segment.number)

    def _replace(self, segment: Segment, ranking: Sequence[Segment], last: Mapping[int, Segment]) -> TrialPlan | None:
        """Replace a lost member by a copy of a survivor that is not behind, or else of the furthest one."""
        count = self._part(len(ranking))
        good = [each for each in ranking[:count] if each.generation >= segment.generation]
        good = good or [each for each in ranking if each.generation >= segment.generation][:1]
        if not good:
            if any(each.state is TrialState.RUNNING for each in last.values()):
                return None  # one may come to be ahead
            furthest = max((each.generation for each in ranking), default=None)
            good = [each for each in ranking if each.generation == furthest]
        if not good or good[0].generation + 1 >= self._options.generations:
            return None
        return self._copy(segment, good)

    def _part(self, count: int) -> int:
        """Return how many of a ranking are good, and as many bad."""
        return max(1, int(count * self._options.truncation)) if self._options.truncation and count > 1 else 0

    def _copy(self, segment: Segment, good: Sequence[Segment]) -> TrialPlan:
        chance = self._chance(segment.member, segment.generation + 1)
        donor = chance.choice(list(good))
        # The steps of a copy are those of its weights.
        return self._begin(segment.member, donor.generation + 1, self._explored(donor.params, chance), donor.number)

    def _explored(self, params: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, dimension in self._config.search_space.items():
            if chance.random() < self._options.resample:
                found[name] = drawn(dimension, chance)
            else:
                found[name] = perturbed(dimension, params[name], chance, self._options.factors)
        return found

    def _draw(self, member: int) -> dict[str, Any]:
        chance = self._chance(member, 0)
        return {name: drawn(dimension, chance) for name, dimension in self._config.search_space.items()}

    def _chance(self, member: int, generation: int) -> random.Random:
        return random.Random(seed_of(self._config.seed, member * 1_000_003 + generation))

    # Rows -------------------------------------------------------------------------------------------------------------

    def _begin(self, member: int, generation: int, params: Mapping[str, Any], parent: int | None) -> TrialPlan:
        run = uuid.uuid4().hex
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions=self._distributions,
            user_attrs={"run": run},
            system_attrs={MEMBER: member, GENERATION: generation, PARENT: parent},
        )
        number = self._storage.create_new_trial(self._id, template_trial=template)
        plan = self._plan(self._segment(self._storage.get_trial(number)), run, 1)
        plan.obsolete = self._obsolete([self._segment(row) for row in self._rows()])
        return plan

    def _obsolete(self, segments: Sequence[Segment]) -> list[str]:
        """Return the folders from which no interval can begin, besides that of the best trial. Each is named once."""
        last = {segment.member: segment for segment in segments}
        complete = [segment for segment in segments if segment.is_complete]
        needed: set[int | None] = {
            segment.number for segment in {segment.member: segment for segment in complete}.values()
        }
        needed |= {segment.parent for segment in segments if segment.state is TrialState.RUNNING}
        needed |= {segment.parent for segment in last.values()}
        needed |= {segment.number for segment in sorted(complete, key=_order)[:1]}
        # Of this generation, each may still become a donor of members that are about to go on.
        behind = min(segment.generation for segment in last.values())
        old = [
            segment.number
            for segment in segments
            if segment.generation < behind and segment.number not in needed | self._removed
        ]
        self._removed.update(old)
        return [_folder(number) for number in old]

    def _plan(self, segment: Segment, run: str, attempt: int) -> TrialPlan:
        interval = self._options.ready_interval
        return TrialPlan(
            id=segment.id,
            number=segment.number,
            params=dict(segment.params),
            run=run,
            attempt=attempt,
            folder=_folder(segment.number),
            load_from=None if segment.parent is None else _folder(segment.parent),
            steps=(segment.generation * interval, (segment.generation + 1) * interval),
        )

    def _rows(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._id, deepcopy=False)

    def _segment(self, row: FrozenTrial) -> Segment:
        return Segment(
            id=row._trial_id,
            number=row.number,
            member=row.system_attrs[MEMBER],
            generation=row.system_attrs[GENERATION],
            params=row.params,
            state=row.state,
            parent=row.system_attrs[PARENT],
            cost=None if row.values is None else self._sign * row.values[0],
        )


def drawn(dimension: Dimension, chance: random.Random) -> Any:
    """Draw a value of a dimension."""
    if dimension.type == "choice":
        return chance.choice(list(dimension.values))
    low, high = dimension.min or 0.0, dimension.max or 0.0
    if dimension.is_logarithmic:
        return _fitting(dimension, math.exp(chance.uniform(math.log(low), math.log(high))))
    return _fitting(dimension, chance.uniform(low, high))


def perturbed(dimension: Dimension, value: Any, chance: random.Random, factors: Sequence[float]) -> Any:
    """Move a value a little: a number by a factor, a choice to a neighbour."""
    if dimension.type == "choice":
        values = list(dimension.values)
        place = values.index(value) + chance.choice((-1, 1))
        return values[min(max(place, 0), len(values) - 1)]
    return _fitting(dimension, value * chance.choice(list(factors)))


def _fitting(dimension: Dimension, value: float) -> float:
    """Return the nearest value of a range."""
    low, high = dimension.min or 0.0, dimension.max or 0.0
    if dimension.step:
        steps = math.floor((high - low) / dimension.step + 1e-9)
        value = low + min(max(round((value - low) / dimension.step), 0), steps) * dimension.step
    value = min(max(value, low), high)
    return round(value) if dimension.is_integer else value


def _order(segment: Segment) -> tuple[float, int]:
    return segment.cost or 0.0, segment.member


def _folder(number: int) -> str:
    return f"trial-{number:05d}"
