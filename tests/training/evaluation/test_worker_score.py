from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.training.evaluation.worker_score import FORGET_FACTOR, FORGET_S, Drift, WorkerScore, median_s

"""The machine may be."""


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _seen(clock: _Clock, *seconds: float, **options: float) -> WorkerScore:
    """Make a worker that has run evaluations of these durations."""
    score = WorkerScore(clock=clock, **options)  # type: ignore[arg-type]
    for each in seconds:
        score.add("job")
        clock.now += each
        score.end("job", is_typical=True)
    return score


def wait_s(score: WorkerScore) -> float:
    return score.free_s()[0]


def end_s(score: WorkerScore) -> float:
    return wait_s(score) + score.cost_s()


# Defect 4 of the reference: after three rounds of warm-up the latency was 3.69 times the truth. The pool was under
# pressure at once, and never recovered, because nothing was observed while evaluations were skipped.


def test_after_three_observations_the_latency_is_correct() -> None:
    score = _seen(_Clock(), 0.5, 0.5, 0.5)
    assert score.latency_s == pytest.approx(0.5)
    assert score.deviation_s == pytest.approx(0.0)


def test_warm_up_answers_are_averaged_without_bias_and_are_no_latency_of_evaluations() -> None:
    score = WorkerScore(initial_s=1.0, clock=_Clock())
    for _ in range(3):
        score.answered(0.029)
    assert score.round_trip_s == pytest.approx(0.029)
    assert score.latency_s == pytest.approx(1.029)
    assert wait_s(score) == 0.0
    assert score.quantile_s(0.95) is None


def test_pressure_ends_without_any_new_observation() -> None:
    clock = _Clock()
    score = _seen(clock, 40.0)
    score.add("a")
    score.add("b")
    assert wait_s(score) > 30
    clock.now += 40
    score.end("a", is_typical=True)
    clock.now += 40
    score.end("b", is_typical=True)
    assert wait_s(score) == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "end", "stop", "fail", "answer"]), st.floats(0, 100)), min_size=1, max_size=80
    ),
    st.integers(1, 3),
)
def test_pressure_is_gone_when_nothing_was_open_for_a_while(steps: list[tuple[str, float]], slots: int) -> None:
    clock = _Clock()
    score = WorkerScore(slots, clock=clock)
    jobs: list[int] = []
    for number, (what, seconds) in enumerate(steps):
        clock.now += seconds
        if what == "add":
            jobs.append(number)
            score.add(number)
        elif what in ("end", "stop") and jobs:
            score.end(jobs.pop(0), is_typical=what == "end")
        elif what == "fail":
            score.failed()
        elif what == "answer":
            score.answered(seconds)
        assert wait_s(score) >= 0
        assert end_s(score) >= 0
        assert score.open == len(jobs)
    for job in jobs:
        score.end(job, is_typical=True)
    clock.now += 61
    assert not score.is_suspended
    assert wait_s(score) == 0.0
    assert math.isfinite(end_s(score))


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=30))
def test_a_longer_queue_is_never_better(latencies: list[float]) -> None:
    score = _seen(_Clock(), *latencies)
    before = end_s(score)
    for number in range(5):
        score.add(number)
        assert end_s(score) >= before
        before = end_s(score)


def test_the_score_is_the_queue_times_the_time_of_one_evaluation() -> None:
    score = _seen(_Clock(), 2.0)
    for number in range(3):
        assert end_s(score) == pytest.approx((number + 1) * 2.0)
        score.add(number)


def test_a_failed_worker_is_left_alone_longer_each_time_until_one_answer() -> None:
    clock = _Clock()
    score = WorkerScore(clock=clock)
    pauses = []
    for _ in range(8):
        score.failed()
        assert end_s(score) == math.inf
        pauses.append(score.suspended_until - clock.now)
        clock.now = score.suspended_until
        assert not score.is_suspended
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    score.failed()
    score.answered(0.01)
    assert not score.is_suspended
    score.failed(max_strikes=2)
    assert not score.is_suspended
    score.failed(max_strikes=2)
    assert score.is_suspended


def test_drift_is_noticed_multiplies_the_score_by_five_and_ends() -> None:
    clock = _Clock()
    score = _seen(clock, *[1.0] * 20)
    assert not score.is_drifting
    score.add("slow")
    clock.now += 3.0
    score.end("slow", is_typical=True)
    assert score.is_drifting
    assert end_s(score) == pytest.approx(5 * score.latency_s)
    for _ in range(5):
        score.add("again")
        clock.now += 1.0
        score.end("again", is_typical=True)
    assert not score.is_drifting


def test_drift_fades_because_an_unused_worker_shows_nothing_new() -> None:
    clock = _Clock()
    score = _seen(clock, *[1.0] * 20, 4.0)
    assert score.is_drifting
    clock.now += 120
    assert not score.is_drifting


@pytest.mark.parametrize("latency_s", [8.0, 800.0])
def test_the_latency_of_an_idle_worker_counts_less_and_less(latency_s: float) -> None:
    clock = _Clock()
    slow = _seen(clock, latency_s)
    assert slow.confidence == pytest.approx(1.0)
    clock.now += min(FORGET_S, FORGET_FACTOR * latency_s)
    assert slow.confidence == pytest.approx(0.5)
    slow.add("job")
    assert slow.confidence == 1.0
    assert slow.cost_s() == pytest.approx(latency_s)


@given(st.lists(st.floats(0.02, 1000), min_size=1, max_size=50))
def test_a_long_constant_latency_is_no_drift(values: list[float]) -> None:
    drift = Drift(noise_s=0.01)
    for _ in range(3):
        drift.add(values[0])
    assert not drift.is_on
    for value in values:
        drift.add(value)
    for _ in range(200):
        drift.add(values[-1])
    assert not drift.is_on


def test_a_quantile_is_one_of_the_observed_values() -> None:
    clock = _Clock()
    score = _seen(clock, *[float(n) for n in range(1, 21)])
    assert score.quantile_s(0.95) == 19.0
    assert score.quantile_s(1.0) == 20.0
    assert median_s([score, _seen(clock, 1.0)]) > 1.0
