"""Sweeps and trials: requests that come again, long answers, states, and other projects."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from skyward.hub.model.refusal import Reason
from skyward.hub.model.sweeps import Direction, Parameter, TrialChange, TrialChanges, TrialState
from skyward.hub.services.sweeps import Sweeps
from skyward.hub.store.database import Database
from tests.hub.services.hubs import ADA, ADMIN, VIEWER, add_project
from tests.hub.services.test_tracking import refused


@pytest.fixture
def sweeps(database: Database) -> Sweeps:
    return Sweeps(database)


def make(sweeps: Sweeps, name: str = "lr", *directions: Direction) -> int:
    return asyncio.run(sweeps.create_sweep(ADA, name, "k", directions or (Direction.MINIMIZE,))).id


def test_requests_that_come_again_have_the_answer_of_the_first(sweeps: Sweeps) -> None:
    number = make(sweeps)
    assert make(sweeps) == number
    refused(
        sweeps.create_sweep(ADA, "lr", "another", [Direction.MINIMIZE]),
        Reason.EXISTS,
        "name='lr': a sweep has this name already; choose another one",
    )
    trial = asyncio.run(sweeps.create_trial(ADA, number, TrialChange(key="a", state=TrialState.WAITING)))
    assert asyncio.run(sweeps.create_trial(ADA, number, TrialChange(key="a", state=TrialState.WAITING))) == trial
    took = [
        asyncio.run(sweeps.change_trial(ADA, trial.id, TrialChange(key=key, state=TrialState.RUNNING)))
        for key in ("first", "second", "first")
    ]
    assert took == [True, False, True]
    end = TrialChange(key="end", state=TrialState.COMPLETED, values=[math.inf])
    assert [asyncio.run(sweeps.change_trial(ADA, trial.id, end)) for _ in range(2)] == [True, True]
    refused(
        sweeps.change_trial(ADA, trial.id, replace(end, key="late")),
        Reason.CONFLICT,
        f"trial={trial.id}: has completed and can not be changed; ask for another one",
    )
    (made,) = asyncio.run(sweeps.sweeps(ADA, 0, 10))
    assert (made.trials, made.version) == (1, 7)


def test_a_reader_who_asks_on_gets_each_change_whatever_the_length_of_an_answer(
    sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.hub.store.sweeps.MOST_TRIALS", 3)
    monkeypatch.setattr("skyward.hub.store.sweeps.MOST_STEPS", 4)
    number = make(sweeps)
    for place in range(10):
        change = TrialChange(key=str(place), params={"x": Parameter(place, "{}")}, steps={0: place, 1: math.nan})
        asyncio.run(sweeps.create_trial(ADA, number, change))
    since, answers = 0, list[TrialChanges]()
    while not answers or not answers[-1].is_complete:
        answers.append(asyncio.run(sweeps.changes(VIEWER, number, since)))
        assert answers[-1].version > since
        since = answers[-1].version
    assert [trial.number for answer in answers for trial in answer.trials] == list(range(10))
    assert [step.value for answer in answers for step in answer.steps if step.step == 0] == list(range(10))
    assert all(math.isnan(step.value) for answer in answers for step in answer.steps if step.step == 1)
    first = answers[0].trials[0]
    asyncio.run(sweeps.change_trial(ADA, first.id, TrialChange(key="r", steps={1: 0.5})))
    last = asyncio.run(sweeps.changes(ADA, number, since))
    assert (list(last.trials), [(step.step, step.value) for step in last.steps]) == ([], [(1, 0.5)])


def test_values_that_do_not_fit_the_objectives_are_refused(sweeps: Sweeps) -> None:
    number = make(sweeps, "two", Direction.MINIMIZE, Direction.MAXIMIZE)
    trial = asyncio.run(sweeps.create_trial(ADA, number, TrialChange(key="a")))
    for call in (
        sweeps.change_trial(ADA, trial.id, TrialChange(key="e", state=TrialState.COMPLETED, values=[1.0])),
        sweeps.create_trial(ADA, number, TrialChange(key="b", state=TrialState.COMPLETED, values=[1.0])),
    ):
        refused(call, Reason.INVALID, "values: 1, and the sweep has 2 objectives; give one for each")
    steps = TrialChange(key="s", steps=dict.fromkeys(range(10_001), 0.0))
    refused(sweeps.change_trial(ADA, trial.id, steps), Reason.INVALID, "steps: 10001 values, and a change takes 10000")


def test_sweeps_of_another_project_are_missing_and_others_sweeps_are_for_admins_to_delete(
    sweeps: Sweeps, database: Database
) -> None:
    number = make(sweeps)
    trial = asyncio.run(sweeps.create_trial(ADA, number, TrialChange(key="a"))).id
    stranger = replace(ADMIN, project=add_project(database, "other"))
    for call in (
        sweeps.sweep(stranger, number),
        sweeps.changes(stranger, number, 0),
        sweeps.trial(stranger, trial),
        sweeps.change_trial(stranger, trial, TrialChange(key="b", state=TrialState.FAILED)),
        sweeps.beat(stranger, trial),
        sweeps.silent_trials(stranger, number, 1),
        sweeps.delete_sweep(stranger, number),
    ):
        refused(call, Reason.MISSING, "no such")
    refused(sweeps.delete_sweep(replace(ADA, user="bob"), number), Reason.FORBIDDEN, "role=researcher: may not delete")
    asyncio.run(sweeps.delete_sweep(ADMIN, number))
    assert asyncio.run(sweeps.sweeps(ADA, 0, 10)) == []


def test_only_trials_whose_worker_was_heard_of_fall_silent(database: Database) -> None:
    now = [1_000_000]
    sweeps = Sweeps(database, clock=lambda: now[0])
    number = make(sweeps)
    heard, unheard = (
        asyncio.run(sweeps.create_trial(ADA, number, TrialChange(key=key))).id for key in ("heard", "unheard")
    )
    asyncio.run(sweeps.beat(ADA, heard))
    now[0] = database.clock() + 9_000
    assert asyncio.run(sweeps.silent_trials(ADA, number, 10)) == []
    now[0] += 60_000
    assert asyncio.run(sweeps.silent_trials(ADA, number, 10)) == [heard]
    asyncio.run(sweeps.change_trial(ADA, heard, TrialChange(key="f", state=TrialState.FAILED)))
    assert asyncio.run(sweeps.silent_trials(ADA, number, 10)) == []
    assert unheard
