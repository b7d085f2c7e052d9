"""Configuration of sweeps: its grammar, and how it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyward.hub.model.refusal import Refusal
from skyward.hub.model.sweep_config import PopulationOptions, TrialResources, parse_config

SPACE: dict[str, Any] = {
    "lr": {"type": "log_uniform", "min": 1e-5, "max": "1e-1"},
    "dropout": {"type": "uniform", "min": 0, "max": 0.5},
    "layers": {"type": "int_uniform", "min": 1, "max": 4},
    "optimizer": ["adam", "sgd"],
}


def config(**changes: Any) -> dict[str, Any]:
    return {"search_space": SPACE, **changes}


def test_whole_configuration_is_read_and_comes_back_the_same_through_json() -> None:
    parsed = parse_config(
        config(
            experiment="digits",
            base_config={"model": "tiny", "max_steps": 100},
            strategy="bayesian",
            objective={"metric": "eval_loss", "direction": "minimize"},
            max_trials=50,
            max_concurrent_trials=4,
            early_stopping={"patience": 3, "min_delta": 0.01},
            pruner={"type": "asha", "min_steps": 1, "reduction": 3},
            resources_per_trial={"gpus": 1, "gpu_type": "A100", "memory": "40Gi"},
        )
    )
    assert parsed.search_space["lr"].max == 0.1
    assert parsed.search_space["optimizer"].values == ("adam", "sgd")
    assert parsed.resources_per_trial == TrialResources(gpus=1, gpu_type="A100", memory=40.0)
    again = parse_config(json.loads(json.dumps(parsed.as_dict())))
    assert again == parsed
    assert again.search_of() == parsed.search_of()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"search_space": {}}, "search_space={}: has no parameter"),
        ({"search_space": {"lr": {"type": "loguniform"}}}, "did you mean log_uniform?"),
        ({"search_space": {"lr": {"type": "uniform", "min": 1}}}, "search_space.lr.max=None: is no number"),
        ({"search_space": {"lr": {"type": "uniform", "min": 2, "max": 1}}}, "is not below max=1"),
        ({"search_space": {"lr": {"type": "log_uniform", "min": 0, "max": 1}}}, "is not above 0"),
        ({"search_space": {"n": {"type": "int_uniform", "min": 0.5, "max": 1}}}, "is no whole number"),
        ({"search_space": {"n": []}}, "is no list of values"),
        ({"search_space": {"n": [1, 1]}}, "has a value twice"),
        ({"search_space": {"n": [[1]]}}, "is no text, number, boolean or null"),
        ({"strategy": "grid"}, "search_space.lr='log_uniform': has no grid"),
        ({"strategy": "bayes"}, "did you mean bayesian?"),
        ({"max_trial": 3}, "config.max_trial=3: is unknown; did you mean max_trials?"),
        ({"max_trials": 0}, "max_trials=0: is no whole number from 1"),
        ({"objective": {"metric": "loss", "direction": "down"}}, "objective.direction='down': is unknown"),
        ({"objective": [{"metric": "a"}, {"metric": "a"}]}, "needs metrics of different names"),
        ({"objective": [{"metric": "a"}, {"metric": "b"}], "pruner": "median"}, "needs a single objective"),
        ({"pruner": "ash"}, "pruner.type='ash': is unknown; did you mean asha?"),
        ({"pruner": {"type": "percentile"}}, "pruner.percentile=None: is missing"),
        ({"early_stopping": {"min_delta": 1}}, "early_stopping.patience=None: is no whole number"),
        ({"base_config": {"lr": 1}}, "base_config='lr': is searched too"),
        ({"resources_per_trial": {"memory": "much"}}, "is no size"),
        ({"population": {"size": 4}}, "is for strategy=pbt"),
        ({"strategy": "pbt", "pruner": "median"}, "does not go with pbt"),
    ],
)
def test_illegal_configuration_is_refused_by_field_and_with_advice(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse_config(config(**changes))
    assert words in refused.value.message
    assert "; " in refused.value.message


def test_number_of_trials_is_that_of_the_grid_the_population_or_the_limit() -> None:
    grid = {"a": ["x", "y"], "b": {"type": "uniform", "min": 0, "max": 1, "step": 0.25}}
    assert parse_config({"search_space": grid, "strategy": "grid"}).trials == 10
    assert parse_config({"search_space": grid, "strategy": "grid", "max_trials": 4}).trials == 4
    assert parse_config(config()).trials == 20
    members = parse_config(config(strategy="pbt", population={"size": 4, "generations": 3}))
    assert (members.trials, members.population) == (12, PopulationOptions(size=4, generations=3))
