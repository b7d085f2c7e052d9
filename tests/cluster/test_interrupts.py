"""Ctrl-C waits while the engine's books are open, and is never lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from skyward.cluster import interrupts


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    interrupts.restore()
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_when_the_last_hold_ends() -> None:
    done: list[str] = []
    interrupts.hold()
    interrupts.hold()
    interrupt()
    done.append("inner")
    interrupts.let_go()
    done.append("outer")
    with pytest.raises(KeyboardInterrupt):
        interrupts.let_go()
    assert done == ["inner", "outer"]
    interrupts.hold()
    interrupts.let_go()


def test_outside_it_comes_at_once() -> None:
    interrupts.hold()
    interrupts.let_go()
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_other_threads_hold_nothing() -> None:
    thread = threading.Thread(target=interrupts.hold)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_the_users_handler_is_called_and_put_back() -> None:
    called: list[int] = []

    def mine(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(signal.SIGINT, mine)
    interrupts.hold()
    interrupt()
    assert called == []
    interrupts.let_go()
    assert called == [signal.SIGINT]
    interrupts.restore()
    assert signal.getsignal(signal.SIGINT) is mine


def test_an_interrupt_within_a_del_is_raised_behind_it() -> None:
    """Python prints what is raised in a `__del__`, and goes on: the user would have to press again."""
    steps: list[str] = []

    class Dropped:
        def __del__(self) -> None:
            interrupt()
            steps.append("del went on")

    interrupts.hold()
    interrupts.let_go()
    dropped = Dropped()
    with pytest.raises(KeyboardInterrupt):
        del dropped
        time.sleep(20)
        steps.append("and never came")
    assert steps == ["del went on"]
