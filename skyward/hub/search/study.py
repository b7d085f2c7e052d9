"""Search by Optuna: a study whose trials are rows of the hub, asked and told by the driver of a sweep."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from ..model.sweep_config import StopPatience, SweepConfig
from .plans import STOPPED, TrialEnd, TrialPlan
from .samplers import distributions_of, holds, pruner_for, sampler_for, suggested

FROM_EARLIER = "skyward:from"
"""Attribute of a trial that was copied from an earlier sweep: its name."""
PRUNED, PATIENCE = "pruned", "patience"
"""Reasons to stop a trial: others were better, or it no longer improves. The latter counts with its value."""


class StudySearch:
    """Search that Optuna's sampler and pruner lead.

    Each call works on the rows alone, so a new search goes on where another one ended.

    Args:
        storage: Storage of the sweep.
        name: Name of the sweep.
        config: Configuration.
    """

    def __init__(self, storage: BaseStorage, name: str, config: SweepConfig) -> None:
        self._storage, self._config = storage, config
        self._distributions = distributions_of(config)
        self._pruner = pruner_for(config)
        self._study = optuna.load_study(
            study_name=name, storage=storage, sampler=sampler_for(config, 0), pruner=self._pruner
        )
        self._id = storage.get_study_id_from_name(name)
        self._is_maximizing = config.objective[0].direction == "maximize"
        rows = self._rows()
        self._count = len(rows)
        self._earlier = sum(FROM_EARLIER in row.system_attrs for row in rows)

    def add_earlier(self, name: str) -> int:
        """Copy the completed trials of another sweep whose parameters are in this one's space. Return their number.

        A sweep that was copied before is not copied again.
        """
        known = {row.system_attrs.get(FROM_EARLIER) for row in self._rows()}
        if name in known or self._config.strategy == "grid":
            return 0
        other = self._storage.get_study_id_from_name(name)
        added = 0
        for row in self._storage.get_all_trials(other, deepcopy=False, states=(TrialState.COMPLETE,)):
            if self._fits(row):
                self._study.add_trial(
                    optuna.trial.create_trial(
                        values=row.values,
                        params=row.params,
                        distributions=self._distributions,
                        system_attrs={FROM_EARLIER: name},
                    )
                )
                added += 1
        self._count += added
        self._earlier += added
        return added

    def unfinished(self) -> Sequence[TrialPlan]:
        plans = []
        for row in self._rows():
            if row.state is TrialState.RUNNING:
                attempt = int(row.user_attrs.get("attempts", 1)) + 1
                self._storage.set_trial_user_attr(row._trial_id, "attempts", attempt)
                self._study.sampler = sampler_for(self._config, row.number)
                # A driver that died while it chose left some parameters open.
                is_whole = row.params.keys() == self._distributions.keys()
                params = row.params if is_whole else self._complete(row._trial_id)
                run = row.user_attrs.get("run") or self._new_run(row._trial_id)
                plans.append(_plan(row._trial_id, row.number, params, run, attempt, last_step=row.last_step))
        return plans

    def ask(self) -> TrialPlan | None:
        if self._count - self._earlier >= self._config.trials:
            return None
        self._study.sampler = sampler_for(self._config, self._count)
        trial = self._study.ask()
        params = suggested(trial, self._distributions)
        self._count = trial.number + 1
        return _plan(trial._trial_id, trial.number, params, self._new_run(trial._trial_id), 1)

    def report(self, plan: TrialPlan, step: int, value: float) -> str:
        self._storage.set_trial_intermediate_value(plan.id, step, value)
        if step <= plan.last_step:  # an earlier attempt got further
            return ""
        trial = self._storage.get_trial(plan.id)
        if self._config.pruner is not None and self._pruner.prune(self._study, trial):
            return PRUNED
        stopping = self._config.early_stopping
        if stopping is not None and has_no_patience(trial, stopping, is_maximizing=self._is_maximizing):
            return PATIENCE
        return ""

    def finish(self, plan: TrialPlan, end: TrialEnd) -> None:
        is_cut = end.stopped_by in (PRUNED, STOPPED)
        error = end.error or self._problem(plan, end, is_cut=is_cut)
        try:
            for name, text in (("error", error), ("stopped_by", end.stopped_by)):
                if text:
                    self._storage.set_trial_user_attr(plan.id, name, text)
            if error:
                self._study.tell(plan.number, state=TrialState.FAIL)
            elif is_cut:
                self._study.tell(plan.number, state=TrialState.PRUNED)  # with its last report as its value
            else:
                self._study.tell(plan.number, list(end.values or ()))
        except (UpdateFinishedTrialError, ValueError):
            if not self._storage.get_trial(plan.id).state.is_finished():
                raise  # otherwise a driver that had lost its lease told it first

    def _problem(self, plan: TrialPlan, end: TrialEnd, *, is_cut: bool) -> str:
        """Return why a trial that did not raise has failed all the same; empty if it has not."""
        if end.values is not None and any(math.isnan(value) for value in end.values):
            return "value=nan: is no number; the trial has no result"
        if end.values is None and not is_cut:
            return "objective: returned no value and reported none; return one"
        if end.stopped_by == STOPPED and self._storage.get_trial(plan.id).last_step is None:
            return "the sweep was stopped before the first report"
        return ""

    # Within -----------------------------------------------------------------------------------------------------------

    def _rows(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._id, deepcopy=False)

    def _complete(self, trial_id: int) -> dict[str, Any]:
        return suggested(optuna.Trial(self._study, trial_id), self._distributions)

    def _new_run(self, trial_id: int) -> str:
        run = uuid.uuid4().hex
        self._storage.set_trial_user_attr(trial_id, "run", run)
        return run

    def _fits(self, row: FrozenTrial) -> bool:
        space = self._config.search_space
        return row.params.keys() == space.keys() and all(
            holds(space[name], value) for name, value in row.params.items()
        )


def has_no_patience(trial: FrozenTrial, stopping: StopPatience, *, is_maximizing: bool) -> bool:
    """Return whether the last reports of a trial bring no improvement over those before.

    Optuna's `PatientPruner` waits for reports that are worse by more than `min_delta`, so a plateau never ends.
    """
    reports = [value for _, value in sorted(trial.intermediate_values.items()) if not math.isnan(value)]
    if len(reports) <= stopping.patience:
        return False
    sign = -1.0 if is_maximizing else 1.0
    before = min(sign * value for value in reports[: -stopping.patience])
    after = min(sign * value for value in reports[-stopping.patience :])
    return after >= before - stopping.min_delta


def _plan(
    trial_id: int, number: int, params: dict[str, Any], run: str, attempt: int, *, last_step: int | None = None
) -> TrialPlan:
    return TrialPlan(
        id=trial_id,
        number=number,
        params=dict(params),
        run=run,
        attempt=attempt,
        folder=f"trial-{number:05d}",
        last_step=-1 if last_step is None else last_step,
    )
