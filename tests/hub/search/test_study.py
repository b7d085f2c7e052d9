"""Search by Optuna: the same trials for a seed, also through deaths of its driver, and why trials stop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState

from skyward.errors import UsageError
from skyward.hub.model.sweep_config import SweepConfig, parse_config
from skyward.hub.search.plans import TrialEnd, TrialPlan
from skyward.hub.search.study import StudySearch

optuna.logging.set_verbosity(optuna.logging.WARNING)
SPACE: dict[str, Any] = {
    "x": {"type": "uniform", "min": -3, "max": 3},
    "n": {"type": "int_uniform", "min": 1, "max": 5},
}


def config(**changes: Any) -> SweepConfig:
    return parse_config({"search_space": SPACE, "max_trials": 12, "seed": 5, **changes})


def study(chosen: SweepConfig, storage: BaseStorage | None = None) -> StudySearch:
    kept = storage or InMemoryStorage()
    if not kept.get_all_studies():
        directions: list[Any] = [goal.direction for goal in chosen.objective]
        optuna.create_study(storage=kept, study_name="s", directions=directions)
    return StudySearch(kept, "s", chosen)


def value_of(plan: TrialPlan) -> float:
    return float(plan.params["x"] ** 2 + plan.params.get("n", 0))


def run(search: StudySearch, most: int = 1000) -> list[dict[str, Any]]:
    """Run trials one by one, and return their parameters."""
    plans: list[dict[str, Any]] = []
    while len(plans) < most and (plan := search.ask()) is not None:
        plans.append(dict(plan.params))
        search.finish(plan, TrialEnd(values=[value_of(plan)]))
    return plans


@pytest.mark.parametrize("strategy", ["random", "bayesian", "gp", "cma-es", "qmc", "nsga-ii", "grid"])
def test_seed_gives_the_same_trials_also_when_each_is_asked_by_another_driver(strategy: str) -> None:
    grid = {"x": [-2.0, 0.0, 2.0], "n": {"type": "int_uniform", "min": 1, "max": 3}}
    chosen = config(strategy=strategy, **({"search_space": grid} if strategy == "grid" else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", optuna.exceptions.ExperimentalWarning)
        whole = run(study(chosen))
        storage = InMemoryStorage()
        parts = [trial for _ in range(12) for trial in run(study(chosen, storage), 1)]
    assert whole == parts
    assert len({tuple(trial.values()) for trial in whole}) == (9 if strategy == "grid" else 12)
    if strategy != "grid":
        assert whole != run(study(config(strategy=strategy, seed=6)))


def test_several_objectives_are_traded_off() -> None:
    chosen = config(
        strategy="nsga-ii",
        objective=[{"metric": "a", "direction": "minimize"}, {"metric": "b", "direction": "maximize"}],
    )
    storage = InMemoryStorage()
    search = study(chosen, storage)
    while (plan := search.ask()) is not None:
        search.finish(plan, TrialEnd(values=[plan.params["x"] ** 2, plan.params["n"]]))
    assert len(optuna.load_study(study_name="s", storage=storage).best_trials) >= 1


def test_running_trials_of_a_dead_driver_begin_again_with_number_run_and_parameters() -> None:
    storage, chosen = InMemoryStorage(), config()
    search = study(chosen, storage)
    first, second = search.ask(), search.ask()
    assert first is not None
    assert second is not None
    search.report(first, 0, 1.0)
    search.finish(second, TrialEnd(values=[1.0]))

    following = study(chosen, storage)
    (again,) = following.unfinished()
    assert (again.number, again.run, again.params, again.attempt) == (first.number, first.run, first.params, 2)
    assert again.last_step == 0
    following.finish(again, TrialEnd(values=[2.0]))
    assert [trial.number for trial in storage.get_all_trials(0)] == [0, 1]
    assert len(run(following)) == 10
    assert not study(chosen, storage).unfinished()


def test_trial_whose_driver_died_while_it_chose_gets_the_rest_of_its_parameters() -> None:
    whole = run(study(config(strategy="random")))
    storage, chosen = InMemoryStorage(), config(strategy="random")
    search = study(chosen, storage)
    run(search, 3)
    trial = optuna.load_study(study_name="s", storage=storage).ask()  # no parameter yet
    assert not trial.params
    (again,) = study(chosen, storage).unfinished()
    assert (again.number, again.params) == (3, whole[3])


@pytest.mark.parametrize(
    ("pruner", "reports"),
    [
        ({"type": "median", "startup_trials": 2}, lambda bad: [bad, bad]),
        ({"type": "percentile", "percentile": 50, "startup_trials": 2}, lambda bad: [bad, bad]),
        ({"type": "asha", "min_steps": 1, "reduction": 2}, lambda bad: [bad, bad]),
        ({"type": "hyperband", "min_steps": 1, "max_steps": 4, "reduction": 2}, lambda bad: [bad] * 4),
        ({"type": "threshold", "upper": 5.0}, lambda bad: [bad]),
        ({"type": "wilcoxon", "p_threshold": 0.3}, lambda bad: [bad + step for step in range(6)]),
    ],
)
def test_each_pruner_stops_a_trial_that_is_worse_than_others(
    pruner: dict[str, Any], reports: Callable[[float], list[float]]
) -> None:
    storage = InMemoryStorage()
    search = study(config(pruner=pruner), storage)
    for good in (1.0, 1.1, 1.2, 1.3):
        plan = search.ask()
        assert plan is not None
        for step, value in enumerate(reports(good)):
            search.report(plan, step, value)
        search.finish(plan, TrialEnd(values=[good]))
    stops = []
    for _ in range(3):  # a bracket of Hyperband may be without rungs
        plan = search.ask()
        assert plan is not None
        reasons = [search.report(plan, step, value) for step, value in enumerate(reports(9.0))]
        stops.append("pruned" in reasons)
        search.finish(plan, TrialEnd(stopped_by="pruned" if stops[-1] else "", values=[9.0]))
    assert any(stops)
    states = [trial.state for trial in storage.get_all_trials(0)[4:]]
    assert states == [TrialState.PRUNED if stop else TrialState.COMPLETE for stop in stops]


def test_trial_without_improvement_stops_and_its_value_counts() -> None:
    storage = InMemoryStorage()
    search = study(config(early_stopping={"patience": 2, "min_delta": 0.1}), storage)
    plan = search.ask()
    assert plan is not None
    values = [1.0, 0.5, 0.45, 0.5]
    assert [search.report(plan, step, value) for step, value in enumerate(values)] == ["", "", "", "patience"]
    search.finish(plan, TrialEnd(values=[0.5], stopped_by="patience"))
    (trial,) = storage.get_all_trials(0)
    assert (trial.state, trial.value, trial.user_attrs["stopped_by"]) == (TrialState.COMPLETE, 0.5, "patience")


@pytest.mark.parametrize(
    ("end", "state", "words"),
    [
        (TrialEnd(error="ValueError: too hot"), TrialState.FAIL, "too hot"),
        (TrialEnd(values=[math.nan]), TrialState.FAIL, "is no number"),
        (TrialEnd(), TrialState.FAIL, "returned no value"),
        (TrialEnd(stopped_by="stopped"), TrialState.FAIL, "before the first report"),
    ],
)
def test_trial_without_a_value_has_failed_and_is_not_infinitely_bad(
    end: TrialEnd, state: TrialState, words: str
) -> None:
    storage = InMemoryStorage()
    search = study(config(), storage)
    plan = search.ask()
    assert plan is not None
    search.finish(plan, end)
    (trial,) = storage.get_all_trials(0)
    assert (trial.state, trial.values) == (state, None)
    assert words in trial.user_attrs["error"]
    search.finish(plan, TrialEnd(values=[1.0]))  # another driver told it meanwhile: the first end counts
    assert storage.get_all_trials(0)[0].state is TrialState.FAIL


def test_earlier_sweep_is_known_once_and_counts_for_no_trial() -> None:
    storage = InMemoryStorage()
    optuna.create_study(storage=storage, study_name="before")
    before = StudySearch(storage, "before", config(max_trials=15))
    run(before)
    optuna.create_study(storage=storage, study_name="s")
    added = []
    for _ in range(2):  # a second driver copies nothing
        search = StudySearch(storage, "s", config())
        added.append(search.add_earlier("before"))
        run(search, 3)
    assert added == [15, 0]
    trials = storage.get_all_trials(storage.get_study_id_from_name("s"))
    assert len(trials) == 15 + 6
    assert len(run(StudySearch(storage, "s", config()))) == 6
    narrow = config(search_space={"x": {"type": "uniform", "min": 0, "max": 3}, "n": SPACE["n"]})
    optuna.create_study(storage=storage, study_name="narrow")
    assert 0 < StudySearch(storage, "narrow", narrow).add_earlier("before") < 15


def test_options_that_a_sampler_or_pruner_does_not_take_are_refused_in_words() -> None:
    with pytest.raises(UsageError, match=r"strategy_options=.*bayesian does not take them .*; see"):
        study(config(strategy_options={"stars": 3}))
    with pytest.raises(UsageError, match=r"pruner=.*is not possible .*; change"):
        study(config(pruner={"type": "asha", "reduction": 1}))
