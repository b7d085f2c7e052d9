"""The ledger of the direct engine: a block sends frames and reports once, at its end, and deadlines are kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from skyward.engine.ledger import Ledger
from skyward.errors import PoolClosed
from skyward.schedule.scheduler import Scheduler


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
