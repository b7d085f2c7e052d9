"""Each fragment is sent once a cycle, whatever H and the number of fragments, and applied before the next is sent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.errors import UsageError
from skyward.training.diloco.schedule import SyncAction, SyncSchedule, local_steps, split_parameters, sync_steps


def actions(schedule: SyncSchedule, steps: int) -> Iterator[tuple[int, str, int]]:
    """Yield the inner step, from 1, of each action with its kind and fragment."""
    for step in range(1, steps + 1):
        for action in schedule.advance():
            yield step, action.kind, action.fragment


def sends(schedule: SyncSchedule, steps: int) -> list[tuple[int, int]]:
    return [(step, fragment) for step, kind, fragment in actions(schedule, steps) if kind == "send"]


# Local steps ----------------------------------------------------------------------------------------------------------


def test_a_worker_of_half_the_speed_does_half_the_steps() -> None:
    assert local_steps({"a": 2.2, "b": 1.1, "c": 0.7}, 100) == {"a": 100, "b": 50, "c": 31}


def test_local_steps_have_bounds() -> None:
    speeds = {"fast": 100.0, "slow": 0.001, "new": 0.0}
    assert local_steps(speeds, 10) == {"fast": 10, "slow": 1, "new": 10}
    assert local_steps(speeds, 10, least=4) == {"fast": 10, "slow": 4, "new": 10}
    assert local_steps({"new": 0.0}, 10) == {"new": 10}
    assert local_steps({}, 10) == {}


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e300), max_size=6), st.integers(1, 10**6))
def test_local_steps_of_any_speeds_are_legal(speeds: dict[str, float], sync_every: int) -> None:
    steps = local_steps(speeds, sync_every)
    assert steps.keys() == speeds.keys()
    assert all(1 <= number <= sync_every for number in steps.values())
    assert all(steps[worker] == sync_every for worker in speeds if speeds[worker] == max(speeds.values()))


@pytest.mark.parametrize("speed", [math.nan, math.inf, -1.0])
def test_a_speed_that_is_no_speed_is_refused_by_the_name_of_its_worker(speed: float) -> None:
    with pytest.raises(UsageError, match="speed of 'w1'"):
        local_steps({"w0": 1.0, "w1": speed}, 10)


def test_least_steps_above_the_most_are_refused() -> None:
    with pytest.raises(UsageError, match="least=11: is above sync_every=10"):
        local_steps({}, 10, least=11)


# Fragments ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.data())
def test_fragments_hold_each_parameter_once_in_order(sizes: list[int], data: st.DataObject) -> None:
    named = {f"p{number}": size for number, size in enumerate(sizes)}
    fragments = split_parameters(named, data.draw(st.integers(1, len(sizes))))
    assert [name for names in fragments for name in names] == list(named)
    assert all(fragments)


def test_fragments_are_balanced_by_size() -> None:
    sizes = {"embedding": 60, "a": 20, "b": 20, "c": 20, "d": 20, "head": 60}
    assert split_parameters(sizes, 3) == (("embedding",), ("a", "b", "c", "d"), ("head",))
    assert split_parameters(sizes, 1) == (tuple(sizes),)


def test_more_fragments_than_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="num_fragments=3: the model has 2 tensors"):
        split_parameters({"a": 1, "b": 1}, 3)


@pytest.mark.parametrize(
    ("sync_every", "num_fragments", "steps"),
    [(6, 1, (6,)), (6, 2, (3, 6)), (7, 2, (4, 7)), (5, 3, (2, 4, 5)), (10, 4, (3, 5, 8, 10)), (2, 3, (1, 2, 2))],
)
def test_fragments_are_spread_over_the_cycle(sync_every: int, num_fragments: int, steps: tuple[int, ...]) -> None:
    assert sync_steps(sync_every, num_fragments) == steps


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 50))
def test_no_remainder_drifts_and_one_fragment_is_in_flight(sync_every: int, num_fragments: int, delay: int) -> None:
    schedule = SyncSchedule(sync_every=sync_every, num_fragments=num_fragments, delay=delay)
    sent, applied, in_flight = [], [], None
    for step, kind, fragment in actions(schedule, 3 * sync_every + delay):
        if kind == "send":
            assert in_flight is None
            in_flight = (step, fragment)
            sent.append((step, fragment))
        else:
            assert in_flight is not None
            assert in_flight[1] == fragment
            assert step <= in_flight[0] + delay
            in_flight = None
            applied.append((step, fragment))
    offsets = sync_steps(sync_every, num_fragments)
    cycles = [(cycle * sync_every + step, k) for cycle in range(4) for k, step in enumerate(offsets)]
    assert sent[: 3 * num_fragments] == cycles[: 3 * num_fragments]
    gaps = {second - first for first, second in zip([0, *offsets], offsets, strict=False)}
    assert max(gaps) - min(gaps) <= 1
    assert len(applied) >= 3 * num_fragments


def test_an_answer_is_applied_the_delay_later_or_when_the_next_fragment_is_due() -> None:
    schedule = SyncSchedule(sync_every=4, num_fragments=2, delay=1)
    assert list(actions(schedule, 5)) == [(2, "send", 0), (3, "apply", 0), (4, "send", 1), (5, "apply", 1)]
    schedule = SyncSchedule(sync_every=4, num_fragments=2, delay=9)
    assert list(actions(schedule, 6)) == [
        (2, "send", 0),
        (4, "apply", 0),
        (4, "send", 1),
        (6, "apply", 1),
        (6, "send", 0),
    ]
    assert schedule.in_flight == 0


def test_without_delay_an_answer_is_applied_at_once() -> None:
    schedule = SyncSchedule(sync_every=2)
    assert schedule.advance() == ()
    assert schedule.advance() == (SyncAction("send", 0), SyncAction("apply", 0))
    assert schedule.in_flight is None


def test_another_h_begins_with_the_next_cycle() -> None:
    schedule = SyncSchedule(sync_every=6, num_fragments=2)
    assert sends(schedule, 4) == [(3, 0)]
    schedule.change_sync_every(3)
    assert schedule.sync_every == 6
    assert sends(schedule, 2) == [(2, 1)]
    assert schedule.sync_every == 3
    assert sends(schedule, 6) == [(2, 0), (3, 1), (5, 0), (6, 1)]
    schedule.change_sync_every(8)
    assert schedule.sync_every == 8


@settings(max_examples=60)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=8))
def test_fragments_take_turns_however_h_changes(num_fragments: int, changes: list[tuple[int, int]]) -> None:
    schedule = SyncSchedule(sync_every=5, num_fragments=num_fragments, delay=1)
    sent = []
    for steps, sync_every in [*changes, (20, 5)]:
        sent += [fragment for _, fragment in sends(schedule, steps)]
        schedule.change_sync_every(sync_every)
    assert sent == [number % num_fragments for number in range(len(sent))]


@pytest.mark.parametrize(("sync_every", "num_fragments"), [(6, 2), (7, 3), (2, 4)])
def test_a_late_joiner_sends_the_fragment_of_the_others(sync_every: int, num_fragments: int) -> None:
    for first in range(num_fragments):
        schedule = SyncSchedule(sync_every=sync_every, num_fragments=num_fragments, first_fragment=first)
        sent = sends(schedule, 3 * sync_every)
        assert [fragment for _, fragment in sent[:4]] == [(first + number) % num_fragments for number in range(4)]
        assert sent[0][0] >= 1


def test_a_restored_schedule_continues_where_it_was() -> None:
    for stop in range(14):
        whole, first, second = (SyncSchedule(sync_every=7, num_fragments=3, delay=2) for _ in range(3))
        for schedule in (whole, first):
            schedule.change_sync_every(5)
            list(actions(schedule, stop))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert list(actions(second, 20)) == list(actions(whole, 20))


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="sync_every=0"):
        SyncSchedule(sync_every=0)
    with pytest.raises(UsageError, match="num_fragments=0"):
        SyncSchedule(sync_every=1, num_fragments=0)
    with pytest.raises(UsageError, match="delay=-1"):
        SyncSchedule(sync_every=1, delay=-1)
    with pytest.raises(UsageError, match="first_fragment=2: no such fragment; use 0 to 1"):
        SyncSchedule(sync_every=4, num_fragments=2, first_fragment=2)
    with pytest.raises(UsageError, match="sync_every=0"):
        SyncSchedule(sync_every=1).change_sync_every(0)
