"""The grammar of searches."""

from __future__ import annotations

import time

import pytest

from skyward.hub.model.refusal import Refusal
from skyward.hub.model.search import EXPERIMENTS, RUNS, Comparison, Entity, Order, parse_filter, parse_order


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("metrics.loss < 0.5", Comparison(Entity.METRIC, "loss", "<", 0.5)),
        ("metric.`train/loss`>=-1e3", Comparison(Entity.METRIC, "train/loss", ">=", -1000.0)),
        ('params."my key" = "v"', Comparison(Entity.PARAM, "my key", "=", "v")),
        ("tags.mlflow.user != 'ada'", Comparison(Entity.TAG, "mlflow.user", "!=", "ada")),
        ("tags.t IS  not null", Comparison(Entity.TAG, "t", "IS NOT NULL", None)),
        ("parameter.p is NULL", Comparison(Entity.PARAM, "p", "IS NULL", None)),
        ("attributes.start_time > 17", Comparison(Entity.ATTRIBUTE, "start_time", ">", 17)),
        ("created > 17", Comparison(Entity.ATTRIBUTE, "start_time", ">", 17)),
        ("run_id IN ('a','b')", Comparison(Entity.ATTRIBUTE, "run_id", "IN", ("a", "b"))),
        ("`Run name` ilike 'x%'", Comparison(Entity.ATTRIBUTE, "run_name", "ILIKE", "x%")),
        ("dataset.name not in ('a')", Comparison(Entity.DATASET, "name", "NOT IN", ("a",))),
    ],
)
def test_a_clause_is_understood(text: str, expected: Comparison) -> None:
    assert parse_filter(text, RUNS) == (expected,)


def test_clauses_are_joined_by_and() -> None:
    assert [c.key for c in parse_filter("metrics.a > 1 AND tags.b = 'x and y' and status = 'RUNNING'", RUNS)] == [
        "a",
        "b",
        "status",
    ]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("metrics.a > 1 OR metrics.b > 2", r"Invalid clause\(s\)"),
        ("metrics.a > 'x'", "Expected numeric value"),
        ("params.a = 5", "Expected a quoted string value"),
        ("params.a > '5'", "Invalid comparator"),
        ("params.a IN ('5')", "Invalid comparator"),
        ("metrics.a IS NULL", "Invalid comparator"),
        ("nothing.a = '5'", "Invalid entity type"),
        ("attribute.nothing = '5'", "Invalid attribute key"),
        ("metrics.a >", "ends too early"),
        ("metrics.a", "ends too early"),
        ("'a' = 'b'", "begin with entity.key"),
        ("run_id IN 'a'", "IN needs a list"),
        ("run_id IN ('a' 'b')", "commas"),
        ("run_id IN (1)", "quoted values only"),
        ("metrics.a > 1; DROP TABLE run", r"Invalid clause\(s\)"),
        ("tags.a = 'x' trailing", r"Invalid clause\(s\)"),
        ("tags.a LIKE '" + "%a" * 17 + "'", "shorten it"),
        ("tags.a = '" + "x" * 20_000 + "'", "use at most"),
    ],
)
def test_a_wrong_filter_is_refused_in_words(text: str, match: str) -> None:
    with pytest.raises(Refusal, match=match) as refused:
        parse_filter(text, RUNS)
    assert refused.value.field == "filter"


def test_experiments_have_no_metrics() -> None:
    with pytest.raises(Refusal, match="search by another"):
        parse_filter("metrics.a > 1", EXPERIMENTS)


def test_orders_are_understood_and_duplicates_refused() -> None:
    assert parse_order(["metrics.`a b` DESC", "start_time", "params.p asc"], RUNS) == (
        Order(Entity.METRIC, "a b", True),
        Order(Entity.ATTRIBUTE, "start_time", False),
        Order(Entity.PARAM, "p", False),
    )
    with pytest.raises(Refusal, match="duplicate fields"):
        parse_order(["metrics.a", "metric.a DESC"], RUNS)
    for wrong in ("metrics.a UP", "", "metrics.a DESC DESC", "1"):
        with pytest.raises(Refusal):
            parse_order([wrong], RUNS)


@pytest.mark.parametrize("text", ["(" * 19_000, "'" * 19_999, "a." * 9_000, "`" * 19_999, "1" * 19_000, "a.`" * 6_000])
def test_hostile_filters_cost_little_time(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(Refusal):
        parse_filter(text, RUNS)
    assert time.process_time() - begun < 1
