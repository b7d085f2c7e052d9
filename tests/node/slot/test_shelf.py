"""The shelf: either the agent or the slot has a task, never both, never neither."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from skyward.node.slot.shelf import Claims, Shelf


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    yield made
    made.close()


@pytest.fixture
def claims(shelf: Shelf) -> Claims:
    return Claims(shelf.slot_end())


def put(shelf: Shelf) -> int:
    number = shelf.put()
    shelf.offer()
    return number


def test_the_slot_has_the_tasks_it_claimed(shelf: Shelf, claims: Claims) -> None:
    number = put(shelf)
    assert claims.claim(number)
    assert shelf.take_back() == []


def test_a_task_that_was_taken_back_is_not_the_slots(shelf: Shelf, claims: Claims) -> None:
    number = put(shelf)
    assert shelf.take_back() == [number]
    assert not claims.claim(number)


def test_the_next_task_after_one_that_was_taken_back_is_the_slots(shelf: Shelf, claims: Claims) -> None:
    void = put(shelf)
    shelf.take_back()
    valid = put(shelf)
    assert not claims.claim(void)
    assert shelf.take_back() == []  # it has claimed the one that comes next
    assert claims.claim(valid)


def test_several_tasks_may_be_taken_back_before_one_that_is_the_slots(shelf: Shelf, claims: Claims) -> None:
    void = [put(shelf), put(shelf)]
    assert shelf.take_back() == void
    valid = put(shelf)
    assert [claims.claim(number) for number in [*void, valid]] == [False, False, True]


def test_tasks_are_the_slots_only_once_they_are_offered(shelf: Shelf, claims: Claims) -> None:
    numbers = [shelf.put(), shelf.put()]
    assert not claims.claim(numbers[0])
    shelf.offer()
    assert [claims.claim(number) for number in numbers] == [True, True]
    unsent = shelf.put()
    assert shelf.take_back() == [unsent]


def test_numbers_do_not_run_out(shelf: Shelf, claims: Claims) -> None:
    for _ in range(70_000):
        number = put(shelf)
        assert 0 < number < 1 << 16
        assert claims.claim(number)


def test_one_of_two_that_reach_for_a_task_gets_it(shelf: Shelf, claims: Claims) -> None:
    claimed: list[int] = []
    frames: list[int] = []
    arrived, is_over = threading.Semaphore(0), threading.Event()

    def slot() -> None:
        for at in range(5001):
            arrived.acquire()
            if claims.claim(frames[at]):
                claimed.append(frames[at])
        is_over.set()

    thread = threading.Thread(target=slot)
    thread.start()
    frames.append(put(shelf))
    taken = shelf.take_back()  # the slot has not heard of this one
    arrived.release()
    for _ in range(5000):
        frames.append(put(shelf))
        arrived.release()
        if len(frames) % 3:  # not the last one, which is the slot's
            taken += shelf.take_back()
    assert is_over.wait(60)
    thread.join()
    assert sorted(claimed + taken) == sorted(frames)
    assert claimed
    assert taken
