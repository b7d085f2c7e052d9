"""Population based training: who copies from whom, by rows alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from skyward.hub.model.sweep_config import Dimension, parse_config
from skyward.hub.search.plans import TrialEnd, TrialPlan
from skyward.hub.search.population import GENERATION, MEMBER, PARENT, PopulationSearch, drawn, perturbed

SPACE: dict[str, Any] = {"lr": {"type": "log_uniform", "min": 1e-4, "max": 1.0}, "kind": ["a", "b", "c"]}


class Population:
    """A population over rows in memory, whose driver can be replaced."""

    def __init__(self, **options: Any) -> None:
        self.config = parse_config(
            {
                "search_space": SPACE,
                "strategy": "pbt",
                "seed": 3,
                "population": {"size": 4, "generations": 3, "ready_interval": 10, **options},
            }
        )
        self.storage = InMemoryStorage()
        optuna.create_study(storage=self.storage, study_name="p")
        self.replace_driver()

    def replace_driver(self) -> None:
        self.search = PopulationSearch(self.storage, "p", self.config)

    def ask(self) -> list[TrialPlan]:
        """Return all intervals that may begin now."""
        plans = []
        while (plan := self.search.ask()) is not None:
            plans.append(plan)
        return plans

    def row(self, plan: TrialPlan) -> tuple[int, int, int | None]:
        """Return member, generation and parent of an interval."""
        attrs = self.storage.get_trial(plan.id).system_attrs
        return attrs[MEMBER], attrs[GENERATION], attrs[PARENT]

    def end(self, plan: TrialPlan, value: float | None = None, **end: Any) -> None:
        self.search.finish(plan, TrialEnd(values=None if value is None else [value], **end))


def test_bad_members_go_on_from_checkpoints_of_good_ones_with_other_parameters() -> None:
    population = Population()
    first = population.ask()
    assert [population.row(plan) for plan in first] == [(member, 0, None) for member in range(4)]
    assert {plan.steps for plan in first} == {(0, 10)}
    for plan, value in zip(first, (3.0, 1.0, 2.0, 4.0), strict=True):
        assert not population.ask(), "all members reach an interval before any goes on"
        population.end(plan, value)
    second = population.ask()
    assert [population.row(plan) for plan in second] == [(0, 1, 0), (1, 1, 1), (2, 1, 2), (3, 1, 1)]
    assert {plan.steps for plan in second} == {(10, 20)}
    copied = second[3]
    assert copied.load_from == first[1].folder
    assert copied.params != first[1].params
    assert second[0].params == first[0].params
    for plan in second:
        population.end(plan, 1.0)
    third = population.ask()
    assert len(third) == 4
    for plan in third:
        population.end(plan, 1.0)
    assert not population.ask()


def test_lost_member_is_replaced_by_a_copy_of_a_survivor_and_a_lost_population_ends() -> None:
    population = Population(truncation=0.25)
    first = population.ask()
    population.end(first[0], error="NodeLost: gone")
    for plan, value in zip(first[1:], (3.0, 1.0, 2.0), strict=True):
        population.end(plan, value)
    second = population.ask()
    # The worst one of three copies too.
    assert [population.row(plan) for plan in second] == [(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 3)]
    for plan in second:
        population.end(plan, error="ValueError: bad")
    assert not population.ask()


def test_members_that_do_not_wait_never_copy_from_one_that_is_behind() -> None:
    population = Population(is_synchronous=False, generations=6)
    slow, *others = population.ask()
    population.end(others[0], 0.1)  # the best, at the first interval
    (ahead,) = population.ask()
    population.end(others[1], 5.0)
    (copy,) = population.ask()
    assert population.row(copy) == (2, 1, others[0].number)
    population.end(copy, 9.0)  # worse than member 1, whose second interval is not over: it goes on by itself
    (alone,) = population.ask()
    assert population.row(alone) == (2, 2, copy.number)
    population.end(ahead, 0.05)
    population.end(slow, error="NodeLost: gone")
    begun = {population.row(plan)[0]: population.row(plan) for plan in population.ask()}
    assert begun[0] == (0, 2, ahead.number)
    assert begun[1] == (1, 2, ahead.number)


def test_next_driver_decides_as_the_dead_one_would_have_and_repeats_what_ran() -> None:
    def run(replace: Callable[[Population], None]) -> list[tuple[Any, ...]]:
        population = Population()
        while plans := population.ask():
            replace(population)
            for plan in plans:
                population.end(plan, plan.params["lr"] + ord(plan.params["kind"]))
                replace(population)
        return [(row.params, row.system_attrs) for row in population.storage.get_all_trials(0)]

    whole = run(lambda population: None)
    assert len(whole) == 12
    assert run(Population.replace_driver) == whole

    population = Population()
    plans = population.ask()
    population.replace_driver()
    again = population.search.unfinished()
    assert [(plan.number, plan.run, plan.params, plan.attempt) for plan in again] == [
        (plan.number, plan.run, plan.params, 2) for plan in plans
    ]
    population.end(again[0], stopped_by="stopped")
    assert population.storage.get_trial(again[0].id).state is TrialState.PRUNED
    (redone,) = population.ask()
    assert (population.row(redone), redone.params) == ((0, 0, None), plans[0].params)


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_end_and_keep_the_rules(seed: int) -> None:
    chance = random.Random(seed)
    population = Population(
        size=chance.randint(2, 7),
        is_synchronous=bool(seed % 2),
        truncation=chance.choice([0.0, 0.2, 0.5]),
        generations=5,
    )
    running: list[TrialPlan] = []
    removed: set[str] = set()
    reached: dict[int, int] = {}
    for _ in range(2000):
        if chance.random() < 0.1:
            population.replace_driver()
        for _ in range(chance.randint(1, 8) if running else 8):  # room for some of them
            if (begun := population.search.ask()) is not None:
                assert begun.load_from not in removed
                removed.update(begun.obsolete)
                running.append(begun)
        if not running:
            break
        assert not {plan.load_from for plan in running} & removed
        plan = running.pop(chance.randrange(len(running)))
        if chance.random() < 0.15:
            population.end(plan, error="NodeLost: gone")
        else:
            population.end(plan, chance.random())
    else:
        raise AssertionError("a population never ends")
    rows = {row.number: row for row in population.storage.get_all_trials(0)}
    for row in rows.values():
        parent = row.system_attrs[PARENT]
        generation = row.system_attrs[GENERATION]
        member = row.system_attrs[MEMBER]
        assert generation == (0 if parent is None else rows[parent].system_attrs[GENERATION] + 1)
        if parent is not None:
            assert rows[parent].state is TrialState.COMPLETE
            assert rows[parent].system_attrs[GENERATION] >= reached.get(member, -1)
        if row.state is TrialState.COMPLETE:
            reached[member] = generation


def test_values_stay_in_their_ranges() -> None:
    chance = random.Random(0)
    whole = Dimension(type="int_uniform", min=1, max=9, step=2)
    wide = Dimension(type="log_uniform", min=1e-3, max=1.0)
    for _ in range(200):
        assert drawn(whole, chance) in (1, 3, 5, 7, 9)
        assert perturbed(whole, 9, chance, (0.8, 1.25)) in (7, 9)
        assert 1e-3 <= perturbed(wide, drawn(wide, chance), chance, (0.1, 10.0)) <= 1.0
        assert perturbed(Dimension(type="choice", values=("a", "b", "c")), "a", chance, ()) in ("a", "b")
