"""Placement of evaluations on workers, by a virtual clock: never much later than the best schedule."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skyward.training.evaluation.placement import choose, place
from skyward.training.evaluation.worker_score import WorkerScore

"""The machine may be."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """True properties of a worker."""

    evaluation_s: float
    cold_s: float = 0.0
    """From when its warm-up begins, which is when the first evaluation comes."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    ends: list[float]
    """By evaluation."""
    counts: list[int]
    """Evaluations by worker."""


def simulated(releases: list[float], truths: list[Truth], temperature: float = 0.0) -> Schedule:
    """Run evaluations requested at these ascending times, as an AdaptiveCompute does, without threads."""
    now = 0.0
    workers = [WorkerScore(clock=lambda: now) for _ in truths]
    order, chance = itertools.count(), random.Random(0)
    events: list[tuple[float, int, int | None, int | None]] = [
        (release, next(order), None, number) for number, release in enumerate(releases)
    ]
    for index, (worker, truth) in enumerate(zip(workers, truths, strict=True)):
        if truth.cold_s:
            worker.add("warm-up")
            events.append((releases[0] + truth.cold_s, next(order), index, None))
    heapq.heapify(events)
    waiting: list[int] = []
    ends, counts = [math.nan] * len(releases), [0] * len(truths)
    while events:
        now, _, at, number = heapq.heappop(events)
        if at is None:
            assert number is not None
            waiting.append(number)
        elif number is None:
            workers[at].end("warm-up", is_typical=False)
        else:
            workers[at].end(number, is_typical=True)
            ends[number] = now
        placed, _ = place([None] * len(waiting), workers, temperature=temperature, chance=chance)
        for job, to in zip(tuple(waiting), placed, strict=True):
            if to is not None:
                assert workers[to].idle_slots == 1
                waiting.remove(job)
                workers[to].add(job)
                counts[to] += 1
                heapq.heappush(events, (now + truths[to].evaluation_s, next(order), to, job))
    assert not waiting, "nothing waits while nothing runs"
    return Schedule(ends=ends, counts=counts)


def best_end(releases: list[float], truths: list[Truth]) -> float:
    """Return when all could have ended with full knowledge. It is exact for equal evaluations."""

    def is_possible(end: float) -> bool:
        starts: list[float] = []
        for truth in truths:
            start, first = end - truth.evaluation_s, releases[0] + truth.cold_s
            while start >= first - 1e-9 and len(starts) < len(releases) * len(truths):
                starts.append(start)
                start -= truth.evaluation_s
        latest = sorted(starts, reverse=True)[: len(releases)]
        return len(latest) == len(releases) and all(
            start >= release - 1e-9 for start, release in zip(latest, reversed(releases), strict=True)
        )

    low, high = releases[-1], releases[-1] + sum(max(each.evaluation_s for each in truths) for _ in releases) + 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return high


def every(seconds: float, count: int = 24) -> list[float]:
    return [seconds * number for number in range(1, count + 1)]


@pytest.mark.parametrize("cold_s", [0.0, 4.0, 17.0, 600.0])
@pytest.mark.parametrize("apart_s", [0.0, 0.15, 0.3])
def test_cold_workers_delay_nothing_and_are_used_when_they_are_warm(cold_s: float, apart_s: float) -> None:
    """Two nodes have to start, and this process is warm."""
    truths = [Truth(evaluation_s=0.6, cold_s=cold_s)] * 2 + [Truth(evaluation_s=0.6)]
    releases = every(apart_s)
    schedule = simulated(releases, truths)
    assert max(schedule.ends) <= best_end(releases, truths) + 0.6 + 1e-6
    if cold_s <= 4:
        assert max(schedule.counts) <= 16, schedule.counts


seconds = st.floats(0.05, 20)
truths = st.builds(Truth, evaluation_s=seconds, cold_s=st.sampled_from([0.0, 0.0, 1.0, 30.0]))
releases = st.lists(st.floats(0, 3), min_size=1, max_size=24).map(lambda gaps: list(itertools.accumulate(gaps)))


@given(releases, st.lists(truths, min_size=1, max_size=5))
@example([0.0, 0.0], [Truth(evaluation_s=1.0), Truth(evaluation_s=1.0, cold_s=30.0)])
def test_all_evaluations_end_within_one_evaluation_of_the_best_schedule(
    asked: list[float], workers: list[Truth]
) -> None:
    """Ignorance costs one evaluation on the slowest worker, whatever the workers."""
    longest_s = max(each.evaluation_s for each in workers)
    end = max(simulated(asked, workers).ends)
    assert end <= best_end(asked, workers) + longest_s + 1e-6


@given(releases, st.lists(seconds, min_size=1, max_size=5), st.floats(0.01, 10))
def test_at_any_temperature_all_evaluations_end(asked: list[float], lasting: list[float], temperature: float) -> None:
    schedule = simulated(asked, [Truth(evaluation_s=each) for each in lasting], temperature)
    assert not any(math.isnan(end) for end in schedule.ends)


def test_a_worker_that_looked_slow_once_is_tried_again_while_others_work() -> None:
    now = 0.0
    once_slow, steady = (WorkerScore(clock=lambda: now) for _ in range(2))
    for worker, lasted_s in ((once_slow, 12.0), (steady, 1.0)):
        worker.add("first")
        now += lasted_s
        worker.end("first", is_typical=True)
    for number in range(600):
        (at,), _ = place([None], [once_slow, steady], temperature=0.0, chance=random.Random(0))
        if at == 0:
            break
        steady.add(number)
        now += 1.0
        steady.end(number, is_typical=True)
    assert 10 < number < 300


def test_an_evaluation_waits_for_a_much_faster_worker() -> None:
    now = 0.0
    fast, slow = (WorkerScore(clock=lambda: now) for _ in range(2))
    for worker, lasted_s in ((fast, 1.0), (slow, 10.0)):
        worker.add("first")
        now += lasted_s
        worker.end("first", is_typical=True)
    placed, wait_s = place([None] * 12, [fast, slow], temperature=0.0, chance=random.Random(0))
    assert placed == [0, *[None] * 9, 1, None]
    assert wait_s == pytest.approx(10.0)


def test_a_barred_worker_is_used_only_if_it_is_alone() -> None:
    one, other = WorkerScore(), WorkerScore()
    chance = random.Random(0)
    assert place([one], [one, other], temperature=0.0, chance=chance)[0] == [1]
    assert place([one], [one], temperature=0.0, chance=chance)[0] == [0]
    other.failed()
    assert place([one, one], [one, other], temperature=0.0, chance=chance) == ([1, None], 0.0)
    one.failed()
    placed, wait_s = place([None], [one, other], temperature=0.0, chance=chance)
    assert placed == [1], "the one whose suspension ends first"
    assert wait_s == math.inf


def test_at_a_temperature_the_better_worker_is_likelier_and_infinite_ones_are_never_taken() -> None:
    chance = random.Random(1)
    taken = [choose([1.0, 2.0, math.inf], 1.0, chance) for _ in range(2000)]
    assert 2 not in taken
    assert 0.68 < taken.count(0) / 2000 < 0.78  # 1 / (1 + 1/e) = 0.731
    assert choose([5.0, 1.0, 1.0], 0.0, chance) == 1
