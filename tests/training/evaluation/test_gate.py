"""The gate keeps the faster way, and its trials cost a short run nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.training.evaluation.gate import TRIAL_SHARE, TRIALS, Gate, GateMode

"""The machine may be."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose evaluations share processors with it, by a virtual clock."""

    count: int
    """Of evaluations."""
    training_s: float
    evaluation_s: float
    slowdown: float
    """Of both while both run. 1: they share nothing. 2: they take turns."""
    cold_s: float = 0.0

    def wall_s(self, mode: GateMode) -> float:
        return self.run(Gate(mode))

    def run(self, gate: Gate) -> float:
        """Return the seconds until all evaluations have ended."""
        now = backlog_s = arrived_at = 0.0
        scored, cold_s, was_warm = 0, self.cold_s, False
        for number in range(self.count):
            left_s = self.training_s
            while left_s > 1e-9:
                both_s = min(left_s, backlog_s)
                now += both_s * self.slowdown if both_s > 0 else left_s
                left_s -= both_s or left_s
                backlog_s = max(0.0, backlog_s - both_s)
            if number > 0:
                known_s = self.evaluation_s if was_warm else None
                gate.observe(now - arrived_at, steps=10, evaluation_s=known_s, is_clear=backlog_s < 1e-9)
            arrived_at = now
            scored += backlog_s < 1e-9 and number > 0
            was_warm = scored > 0
            backlog_s, cold_s = backlog_s + self.evaluation_s + cold_s, 0.0
            if gate.way == "inline":
                now, backlog_s = now + backlog_s, 0.0
        return now + backlog_s


runs = st.builds(
    Run,
    count=st.integers(1, 40),
    training_s=st.floats(0.01, 100),
    evaluation_s=st.floats(0.01, 100),
    slowdown=st.floats(1, 2),
    cold_s=st.sampled_from([0.0, 2.0, 60.0]),
)


@settings(max_examples=60)
@given(runs)
def test_a_run_takes_at_most_a_tenth_longer_than_by_the_better_way(run: Run) -> None:
    """Runs of any length are tried, on any machine that loses nothing when two share its processors."""
    assert run.wall_s("auto") <= 1.1 * min(run.wall_s("always"), run.wall_s("sync")) + 1e-6


@settings(max_examples=60)
@given(runs)
def test_a_short_run_waits_for_no_cold_worker(run: Run) -> None:
    gate = Gate("auto")
    short = Run(
        count=min(run.count, 5),
        training_s=run.training_s,
        evaluation_s=run.evaluation_s,
        slowdown=run.slowdown,
        cold_s=1000.0,
    )
    assert short.run(gate) <= short.wall_s("always") + TRIAL_SHARE * short.count * run.training_s * run.slowdown


def test_processors_that_lose_time_when_they_are_shared_are_noticed() -> None:
    run, gate = Run(count=200, training_s=1.0, evaluation_s=0.2, slowdown=4.0), Gate("auto")
    wall_s = run.run(gate)
    assert gate.way == "inline"
    assert wall_s < 1.1 * run.wall_s("sync") < run.wall_s("always")


def test_other_hardware_is_recognised_as_faster() -> None:
    run, gate = Run(count=200, training_s=1.0, evaluation_s=0.5, slowdown=1.0), Gate("auto")
    wall_s = run.run(gate)
    assert gate.is_settled
    assert gate.way == "beside"
    assert gate.seconds == {"beside": pytest.approx(1.0), "inline": pytest.approx(1.5)}
    assert wall_s <= run.wall_s("always") + TRIALS * 0.5 + 1e-6


def test_evaluations_slower_than_their_interval_count_by_their_own_length() -> None:
    gate = Gate("auto")
    gate.observe(1.0, steps=10, evaluation_s=3.0)
    gate.observe(1.0, steps=10, evaluation_s=3.0, slots=2)
    assert gate.seconds == {"beside": 1.5}


def test_an_interval_with_a_cold_worker_does_not_count() -> None:
    gate = Gate("auto")
    for _ in range(100):
        gate.observe(100.0, steps=1, evaluation_s=None)
    assert gate.seconds == {}
    gate.observe(1.0, steps=1, evaluation_s=0.1)
    assert gate.seconds == {"beside": 1.0}
    assert gate.way == "inline"


def test_nothing_is_tried_while_evaluations_queue() -> None:
    gate = Gate("auto")
    for _ in range(100):
        gate.observe(1.0, steps=1, evaluation_s=0.1, is_clear=False)
        assert gate.way == "beside"


def test_intervals_of_other_lengths_are_not_compared() -> None:
    gate = Gate("auto")
    gate.observe(1.0, steps=10, evaluation_s=0.5)
    gate.observe(0.1, steps=1, evaluation_s=0.5)
    gate.observe(2.0, steps=10, evaluation_s=0.5)
    assert gate.seconds == {"beside": 2.0}


@pytest.mark.parametrize(("mode", "way"), [("always", "beside"), ("sync", "inline")])
def test_a_given_way_is_not_tried(mode: Literal["always", "sync"], way: str) -> None:
    gate = Gate(mode)
    gate.observe(1.0, steps=1, evaluation_s=0.1)
    assert gate.is_settled
    assert gate.way == way
