"""The ledger of the direct engine: a block sends frames and reports once, at its end, and deadlines are kept."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from skyward.engine.ledger import Ledger
from skyward.engine.tasks import Task
from skyward.errors import PoolClosed
from skyward.schedule.scheduler import Scheduler
from tests.engine.parts import plain_task

NUMBERS = itertools.count(10)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger(Scheduler())
    yield ledger
    ledger.watcher.close()


def is_free(lock: threading.RLock) -> bool:
    """Return whether another thread could take the lock now."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def test_reports_wait_until_the_outermost_block_ends_and_the_lock_is_free(ledger: Ledger) -> None:
    told: list[bool] = []
    with ledger:
        with ledger:
            ledger.after.append(lambda: told.append(is_free(ledger.lock)))
        assert not told
        assert not is_free(ledger.lock)
    assert told == [True]


def test_all_reports_are_made_even_if_one_of_them_raises(ledger: Ledger) -> None:
    told: list[int] = []
    with pytest.raises(ZeroDivisionError), ledger:
        ledger.after += [lambda: 1 // 0, lambda: told.append(1)]
    assert told == [1]
    assert is_free(ledger.lock)


def test_a_block_that_raises_releases_the_lock_and_reports(ledger: Ledger) -> None:
    told: list[int] = []
    with pytest.raises(KeyError), ledger:
        ledger.after.append(lambda: told.append(1))
        raise KeyError
    assert told == [1]
    assert is_free(ledger.lock)


def test_due_deadlines_are_called_and_the_next_one_sets_the_wait(ledger: Ledger) -> None:
    called: list[tuple[int, int]] = []
    with ledger:
        assert ledger.run_deadlines() is None
        ledger.at(1000.0, lambda subject, attempt: called.append((subject, attempt)), 2, 0)
        ledger.at(0.0, lambda subject, attempt: called.append((subject, attempt)), 1, 3)
        wait_s = ledger.run_deadlines()
    assert called == [(1, 3)]
    assert wait_s is not None
    assert 900 < wait_s <= 1000


def test_a_closed_ledger_takes_no_calls(ledger: Ledger) -> None:
    with pytest.raises(PoolClosed):
        ledger.require_open()
    ledger.is_open = True
    ledger.require_open()
    with ledger:
        assert ledger.close_all() == ([], [])
    with pytest.raises(PoolClosed):
        ledger.require_open()


class TestTasksThatAreLeft:
    @pytest.fixture
    def woken(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        calls: list[bool] = []
        monkeypatch.setattr(ledger.watcher, "wake", lambda: calls.append(True))
        return calls

    @pytest.fixture
    def taken(self, ledger: Ledger) -> list[Task]:
        tasks: list[Task] = []
        ledger.take_in = tasks.append
        ledger.is_open, ledger.many = True, 2
        ledger.tasks = dict.fromkeys(range(2), plain_task(next(NUMBERS)))
        return tasks

    def test_the_first_few_open_tasks_are_never_left(self, ledger: Ledger, taken: list[Task]) -> None:
        ledger.tasks.clear()
        assert not ledger.leave(plain_task(next(NUMBERS)))
        assert not ledger.arrivals

    def test_the_io_thread_is_woken_once_for_all_that_come_until_it_looks(
        self, ledger: Ledger, taken: list[Task], woken: list[bool]
    ) -> None:
        tasks = [plain_task(next(NUMBERS)) for _ in range(3)]
        assert all(map(ledger.leave, tasks))
        assert (woken, taken) == ([True], [])
        ledger.take_in_left()
        assert taken == tasks

    def test_a_task_wakes_it_again_even_if_another_thread_took_those_before(
        self, ledger: Ledger, taken: list[Task], woken: list[bool]
    ) -> None:
        ledger.leave(plain_task(next(NUMBERS)))
        with ledger:
            pass
        ledger.take_in_left()
        ledger.leave(plain_task(next(NUMBERS)))
        assert (len(taken), len(woken)) == (1, 2)

    def test_there_are_never_more_than_a_block_takes_in_quickly(
        self, ledger: Ledger, taken: list[Task], woken: list[bool]
    ) -> None:
        for _ in range(1000):
            ledger.leave(plain_task(next(NUMBERS)))
            assert len(ledger.arrivals) < 256

    def test_a_closed_ledger_leaves_none(self, ledger: Ledger, taken: list[Task]) -> None:
        with ledger:
            ledger.close_all()
        assert not ledger.leave(plain_task(next(NUMBERS)))
