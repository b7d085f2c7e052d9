from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.training.evaluation.dispatchers.backlog import Backlog, MovingAverage

"""The machine may be."""


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_average_of_equal_values_is_that_value_from_the_first_on() -> None:
    average = MovingAverage(0.9)
    assert average.value is None
    for _ in range(5):
        average.add(3.0)
        assert average.value == pytest.approx(3.0)


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=50), st.sampled_from([0.0, 0.5, 0.9, 0.999]))
def test_an_average_lies_among_the_observed_values(values: list[float], beta: float) -> None:
    average = MovingAverage(beta)
    for value in values:
        average.add(value)
    assert average.value is not None
    assert min(values) * 0.999 <= average.value <= max(values) * 1.001


def test_a_free_worker_has_no_wait() -> None:
    backlog = Backlog(2)
    backlog.add("a")
    assert backlog.wait_s() == 0.0


def test_each_waiting_evaluation_adds_its_share() -> None:
    clock = _Clock()
    backlog = Backlog(1, clock=clock)
    backlog.add("a")
    clock.now = 4.0
    assert backlog.end("a") == 4.0
    backlog.add("b")
    backlog.add("c")
    clock.now = 5.0
    assert backlog.wait_s() == pytest.approx(3.0 + 4.0)
    assert backlog.end("c") is None
    assert backlog.wait_s() == pytest.approx(3.0)


def test_two_slots_take_turns() -> None:
    clock = _Clock()
    backlog = Backlog(2, initial_s=10.0, clock=clock)
    backlog.add("a")
    clock.now = 6.0
    backlog.add("b")
    backlog.add("c")  # begins at 10, when a ends
    assert backlog.wait_s() == pytest.approx(10.0)  # b ends at 16
    backlog.add("d")  # begins at 16
    assert backlog.wait_s() == pytest.approx(14.0)  # c ends at 20


def test_a_hanging_worker_looks_worse_and_worse() -> None:
    clock = _Clock()
    backlog = Backlog(1, initial_s=1.0, clock=clock)
    backlog.add("a")
    waits = []
    for now in (1.5, 3.0, 60.0):
        clock.now = now
        waits.append(backlog.wait_s())
    assert waits == [pytest.approx(0.5), pytest.approx(2.0), pytest.approx(59.0)]
    backlog.end("a", is_typical=False)
    assert backlog.wait_s() == 0.0
    assert backlog.expected_s == 1.0


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["add", "end"]), st.integers(0, 9), st.floats(0, 5)), max_size=60),
)
def test_counts_and_waits_are_never_negative(slots: int, steps: list[tuple[str, int, float]]) -> None:
    clock = _Clock()
    backlog, open_jobs = Backlog(slots, clock=clock), set()
    for what, job, seconds in steps:
        clock.now += seconds
        if what == "add" and job not in open_jobs:
            backlog.add(job)
            open_jobs.add(job)
        elif what == "end":
            backlog.end(job)
            open_jobs.discard(job)
        assert len(backlog) == len(open_jobs)
        assert backlog.wait_s() >= 0
        if len(open_jobs) < slots:
            assert backlog.wait_s() == 0
