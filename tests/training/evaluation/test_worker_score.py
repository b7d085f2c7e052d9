from __future__ import annotations

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyward.training.evaluation.worker_score import FORGET_S, Drift, WorkerScore, choose, median_s

BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be."""


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _seen(clock: _Clock, *seconds: float, **options: float) -> WorkerScore:
    """A worker that has run evaluations that took so long."""
    score = WorkerScore(clock=clock, **options)  # type: ignore[arg-type]
    for each in seconds:
        score.add("job")
        clock.now += each
        score.end("job", is_typical=True)
    return score


# Defect 4 of the reference: after three rounds of warm-up the latency was 3.69 times the truth, the pool was under
# pressure at once, and never recovered as nothing was observed while evaluations were skipped.


def test_after_three_observations_the_latency_is_the_truth() -> None:
    score = _seen(_Clock(), 0.5, 0.5, 0.5)
    assert score.latency_s == pytest.approx(0.5)
    assert score.deviation_s == pytest.approx(0.0)


def test_answers_of_a_warm_up_are_averaged_without_bias_and_are_no_latency_of_evaluations() -> None:
    score = WorkerScore(initial_s=1.0, clock=_Clock())
    for _ in range(3):
        score.answered(0.029)
    assert score.round_trip_s == pytest.approx(0.029)
    assert score.latency_s == pytest.approx(1.029)
    assert score.wait_s() == 0.0
    assert score.quantile_s(0.95) is None


def test_pressure_ends_without_any_new_observation() -> None:
    clock = _Clock()
    score = _seen(clock, 40.0)
    score.add("a")
    score.add("b")
    assert score.wait_s() > 30
    clock.now += 40
    score.end("a", is_typical=True)
    clock.now += 40
    score.end("b", is_typical=True)
    assert score.wait_s() == 0.0


@BUSY
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "end", "stop", "fail", "answer"]), st.floats(0, 100)), min_size=1, max_size=80
    ),
    st.integers(1, 3),
)
def test_whatever_happened_pressure_is_gone_when_nothing_is_open_for_a_while(
    steps: list[tuple[str, float]], slots: int
) -> None:
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
        assert score.wait_s() >= 0
        assert score.score_s() >= 0
        assert score.open == len(jobs)
    for job in jobs:
        score.end(job, is_typical=True)
    clock.now += 61
    assert not score.is_suspended
    assert score.wait_s() == 0.0
    assert math.isfinite(score.score_s())


@BUSY
@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=30))
def test_a_longer_queue_is_never_better(latencies: list[float]) -> None:
    score = _seen(_Clock(), *latencies)
    before = score.score_s()
    for number in range(5):
        score.add(number)
        assert score.score_s() >= before
        before = score.score_s()


def test_the_score_is_what_waits_times_how_long_one_takes() -> None:
    score = _seen(_Clock(), 2.0)
    for number in range(3):
        assert score.score_s() == pytest.approx((number + 1) * 2.0)
        score.add(number)


def test_the_quicker_of_two_is_taken_until_its_queue_is_longer() -> None:
    clock = _Clock()
    quick, slow = _seen(clock, 1.0), _seen(clock, 3.0)
    clock.now = 4.0
    taken = []
    for number in range(5):
        at = choose([quick.score_s(), slow.score_s()], 0.0, random.Random(0))
        (quick, slow)[at].add(number)
        taken.append(at)
    assert taken.count(0) == 4
    assert taken.count(1) == 1


def test_one_that_failed_is_left_alone_longer_each_time_and_one_answer_ends_it() -> None:
    clock = _Clock()
    score = WorkerScore(clock=clock)
    pauses = []
    for _ in range(8):
        score.failed()
        assert score.score_s() == math.inf
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


def test_drift_is_seen_multiplies_the_score_by_five_and_ends() -> None:
    clock = _Clock()
    score = _seen(clock, *[1.0] * 20)
    assert not score.is_drifting
    score.add("slow")
    clock.now += 3.0
    score.end("slow", is_typical=True)
    assert score.is_drifting
    assert score.score_s() == pytest.approx(5 * score.latency_s)
    for _ in range(5):
        score.add("again")
        clock.now += 1.0
        score.end("again", is_typical=True)
    assert not score.is_drifting


def test_drift_is_forgotten_by_and_by_as_a_worker_that_is_not_asked_shows_nothing_new() -> None:
    clock = _Clock()
    score = _seen(clock, *[1.0] * 20, 4.0)
    assert score.is_drifting
    clock.now += 120
    assert not score.is_drifting


def test_a_slow_worker_is_tried_again_when_it_was_not_asked_for_long() -> None:
    clock = _Clock()
    slow = _seen(clock, 8.0)
    assert slow.score_s() == pytest.approx(8.0)
    clock.now += FORGET_S
    assert slow.score_s() == pytest.approx(4.0)
    assert slow.latency_s == pytest.approx(8.0)


@BUSY
@given(st.lists(st.floats(0.02, 1000), min_size=1, max_size=50))
def test_what_stays_the_same_for_long_is_no_drift_whatever_was_before(values: list[float]) -> None:
    drift = Drift(noise_s=0.01)
    for _ in range(3):
        drift.add(values[0])
    assert not drift.is_on
    for value in values:
        drift.add(value)
    for _ in range(200):
        drift.add(values[-1])
    assert not drift.is_on


def test_at_a_temperature_the_better_is_likelier_and_infinite_ones_are_never_taken() -> None:
    chance = random.Random(1)
    taken = [choose([1.0, 2.0, math.inf], 1.0, chance) for _ in range(2000)]
    assert 2 not in taken
    assert 0.68 < taken.count(0) / 2000 < 0.78  # 1 / (1 + 1/e) = 0.731
    assert choose([5.0, 1.0, 1.0], 0.0, chance) == 1


def test_a_quantile_is_of_what_was_seen() -> None:
    clock = _Clock()
    score = _seen(clock, *[float(n) for n in range(1, 21)])
    assert score.quantile_s(0.95) == 19.0
    assert score.quantile_s(1.0) == 20.0
    assert median_s([score, _seen(clock, 1.0)]) > 1.0
