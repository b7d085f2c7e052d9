"""The gate keeps the faster way, from what it is told of a few intervals."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.training.evaluation.gate import PATIENCE, TRIAL, Gate


def run(training_s: float, evaluation_s: float, slowdown: float, intervals: int) -> tuple[Gate, float]:
    """A gate, and how long a run of so many intervals takes with it, where both ways cost what is said."""
    gate, total = Gate("auto"), 0.0
    beside = max(training_s, evaluation_s) * slowdown
    for _ in range(intervals):
        is_settled = gate.is_settled
        seconds = beside if gate.way == "beside" else training_s + evaluation_s
        total += seconds
        if not is_settled:
            gate.observe(seconds, steps=10)
    return gate, total


def test_other_hardware_is_found_to_be_faster() -> None:
    gate, _ = run(1.0, 1.0, 1.0, 10)
    assert gate.way == "beside"
    assert gate.seconds == {"beside": 1.0, "inline": 2.0}


def test_processors_that_are_shared_are_found_to_be_slower() -> None:
    gate, _ = run(1.0, 0.2, 1.5, 10)
    assert gate.way == "inline"


@settings(deadline=None)  # a busy machine takes its time
@given(
    training_s=st.floats(0.01, 100),
    evaluation_s=st.floats(0.01, 100),
    slowdown=st.floats(1.0, 5.0),
    intervals=st.integers(1, 60),
)
def test_it_is_never_worse_than_either_way_by_more_than_its_trial(
    training_s: float, evaluation_s: float, slowdown: float, intervals: int
) -> None:
    _, total = run(training_s, evaluation_s, slowdown, intervals)
    ways = {"beside": max(training_s, evaluation_s) * slowdown, "inline": training_s + evaluation_s}
    best, worst = min(ways.values()), max(ways.values())
    assert total <= intervals * best + min(intervals, len(TRIAL)) * (worst - best) + 1e-6


def test_the_first_interval_does_not_count() -> None:
    gate = Gate("auto")
    for seconds in (100.0, 1.0, 2.0, 1.0, 2.0):
        gate.observe(seconds, steps=1)
    assert gate.seconds == {"beside": 1.0, "inline": 2.0}
    assert gate.is_settled


def test_intervals_of_other_lengths_are_not_compared() -> None:
    gate = Gate("auto")
    gate.observe(1.0, steps=10)
    gate.observe(0.1, steps=1)
    for seconds in (2.0, 1.0, 2.0, 1.0):
        gate.observe(seconds, steps=10)
    assert gate.seconds == {"beside": 2.0, "inline": 1.0}
    assert gate.way == "inline"


def test_a_run_without_two_equal_intervals_is_settled_all_the_same() -> None:
    gate = Gate("auto")
    for steps in range(PATIENCE * len(TRIAL)):
        assert not gate.is_settled
        gate.observe(1.0, steps=steps)
    assert (gate.is_settled, gate.way) == (True, "beside")


@pytest.mark.parametrize(("mode", "way"), [("always", "beside"), ("sync", "inline")])
def test_what_is_said_is_not_tried(mode: Literal["always", "sync"], way: str) -> None:
    gate = Gate(mode)
    gate.observe(1.0, steps=1)
    assert gate.is_settled
    assert gate.way == way
