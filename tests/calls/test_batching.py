"""Calls that are gathered into lists, on an object in this process; threads are the callers."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.errors import UsageError

LIMIT_S = 60.0


class Doubler:
    def __init__(self) -> None:
        self.lists: list[list[int]] = []
        self.may_run = threading.Event()
        self.may_run.set()

    @sky.batched(max_size=4, wait_s=30)
    def full(self, xs: list[int]) -> list[int]:
        """Called as soon as four items have come."""
        self.lists.append(xs)
        return [2 * x for x in xs]

    @sky.batched(max_size=4, wait_s=0)
    def at_once(self, xs: list[int]) -> list[int]:
        self.lists.append(xs)
        assert self.may_run.wait(LIMIT_S)
        if 0 in xs:
            raise ZeroDivisionError("no zero")
        if 1 in xs:
            return xs[1:]
        if 2 in xs:
            return 2  # type: ignore[return-value]
        if 3 in xs and len(self.lists) == 1:
            raise KeyboardInterrupt  # as a cancelled caller gets it
        return [2 * x for x in xs]


@pytest.fixture
def callers() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(16) as executor:
        yield executor


def test_items_are_gathered_up_to_the_most_and_each_caller_gets_its_value(
    callers: concurrent.futures.ThreadPoolExecutor,
) -> None:
    doubler = Doubler()
    assert list(callers.map(doubler.full, range(12), timeout=LIMIT_S)) == [2 * x for x in range(12)]
    assert [len(items) for items in doubler.lists] == [4, 4, 4]
    assert sorted(x for items in doubler.lists for x in items) == list(range(12))


def test_a_lone_item_is_called_when_its_wait_is_over() -> None:
    assert Doubler().at_once(5) == 10


def test_an_error_of_the_method_is_that_of_each_call_and_the_next_list_works(
    callers: concurrent.futures.ThreadPoolExecutor,
) -> None:
    doubler = Doubler()
    with pytest.raises(ZeroDivisionError, match="no zero"):
        doubler.at_once(0)
    with pytest.raises(UsageError, match=r"Doubler\.at_once: returned 0 values for 1 items"):
        doubler.at_once(1)
    with pytest.raises(UsageError, match=r"Doubler\.at_once: returned int; return a list"):
        doubler.at_once(2)
    assert doubler.at_once(9) == 18


def test_a_cancelled_leader_leaves_the_others_to_the_next(callers: concurrent.futures.ThreadPoolExecutor) -> None:
    doubler = Doubler()
    doubler.may_run.clear()
    leader = callers.submit(doubler.at_once, 3)
    while not doubler.lists:  # it waits within the method now
        threading.Event().wait(0.001)
    others = [callers.submit(doubler.at_once, x) for x in range(5, 11)]
    doubler.may_run.set()
    assert isinstance(leader.exception(LIMIT_S), KeyboardInterrupt)
    assert [other.result(LIMIT_S) for other in others] == [2 * x for x in range(5, 11)]
    assert all(3 not in items for items in doubler.lists[1:])


@pytest.mark.parametrize(
    ("max_size", "wait_s", "words"),
    [
        (0, 0.1, "max_size=0: must be a whole number >= 1"),
        (True, 0.1, "max_size=True: must be"),
        (8, -1, "wait_s=-1: must be a number of seconds >= 0"),
        (8, "1", "wait_s='1': must be"),
    ],
)
def test_illegal_sizes_and_waits_are_refused(max_size: int, wait_s: float, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        sky.batched(max_size=max_size, wait_s=wait_s)
    assert words in str(refused.value)


def test_a_method_of_another_shape_is_refused() -> None:
    with pytest.raises(UsageError, match=r"score\(self, xs, ys\): a batched method takes self and one list"):
        sky.batched(max_size=2, wait_s=0)(_two_lists)  # type: ignore[arg-type]


def test_an_actor_that_runs_one_call_at_a_time_cannot_gather() -> None:
    one_at_a_time = sky.actor(Doubler)
    words = r"concurrency=1: Doubler\.(at_once|\w+) gathers up to 4 calls, .* write @sky\.actor\(concurrency=4\)"
    with pytest.raises(UsageError, match=words):
        one_at_a_time()
    one_at_a_time.with_options(concurrency=4)()
    assert one_at_a_time.local().at_once(5) == 10


def _two_lists(self: object, xs: list[int], ys: list[int]) -> list[int]:
    raise AssertionError("never called")


_two_lists.__qualname__ = "score"
