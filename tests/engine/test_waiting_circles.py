"""Circles of calls that wait for each other: which calls could never end, and which only have to wait."""

from __future__ import annotations

import pytest

from skyward.engine.waiting_circles import find_circle

Calls = dict[int, list[int]]


@pytest.mark.parametrize(
    ("made_by", "blockers", "circle"),
    [
        ({1: [2]}, {2: [1]}, [2, 1]),
        ({1: [2], 3: [4]}, {2: [3], 4: [1]}, [2, 3, 4, 1]),
        ({1: [2], 3: [5], 5: [4]}, {2: [3], 4: [1]}, [2, 3, 5, 4, 1]),
        ({1: [2], 3: [4], 5: [6]}, {2: [3], 4: [5], 6: [1]}, [2, 3, 4, 5, 6, 1]),
        ({1: [2], 3: [7, 4]}, {2: [3], 4: [1]}, [2, 3, 4, 1]),
        ({1: [2], 3: [4], 5: [6]}, {2: [3, 5], 4: [1], 6: [1]}, [2, 3, 4, 1]),
        ({1: [2], 3: [4], 5: [6]}, {2: [3], 4: [5], 6: [3]}, [2, 3, 4, 5, 6]),
    ],
    ids=["itself", "two", "by way of a task", "three", "also for others", "all room", "the others only"],
)
def test_calls_that_wait_for_each_other_are_found(made_by: Calls, blockers: Calls, circle: list[int]) -> None:
    assert find_circle(2, made_by.get, blockers.get) == circle


@pytest.mark.parametrize(
    ("made_by", "blockers"),
    [
        ({1: [2]}, {}),
        ({1: [2], 3: [4]}, {2: [3]}),
        ({1: [2], 3: [4], 5: [6]}, {2: [3, 5], 4: [1]}),
        ({1: [2], 3: [4], 5: [6]}, {2: [3], 4: [1, 5]}),
    ],
    ids=["it has room", "the other waits for a third", "one of two ends", "one of two ends later"],
)
def test_calls_that_only_have_to_wait_are_not(made_by: Calls, blockers: Calls) -> None:
    assert find_circle(2, made_by.get, blockers.get) == []
