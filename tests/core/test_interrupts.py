"""Signal handlers wait while the engine's ledger is locked, and no signal is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from skyward.core import interrupts


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    interrupts.restore()
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_interrupt_is_delivered_when_the_last_hold_ends() -> None:
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


def test_an_interrupt_outside_a_hold_is_delivered_at_once() -> None:
    interrupts.hold()
    interrupts.let_go()
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_other_threads_delay_no_interrupt() -> None:
    thread = threading.Thread(target=interrupts.hold)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_the_users_handler_is_called_and_restored() -> None:
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


def test_an_interrupt_within_a_del_is_raised_after_it() -> None:
    """Python only prints an exception raised in `__del__`, so the user would have to press Ctrl-C again."""
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


class Alarm(Exception):
    pass


def raise_alarm(number: int, frame: object) -> None:
    raise Alarm(number)


@pytest.fixture
def alarms() -> Iterator[None]:
    """Make SIGALRM, SIGTERM and a real-time signal raise."""
    numbers = (signal.SIGALRM, signal.SIGTERM, signal.SIGRTMIN)
    before = {number: signal.signal(number, raise_alarm) for number in numbers}
    yield
    interrupts.restore()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGRTMIN])
def test_no_handler_of_any_signal_raises_within_a_hold(alarms: None, number: int) -> None:
    interrupts.hold()
    os.kill(os.getpid(), number)
    steps = ["went on"]
    with pytest.raises(Alarm):
        interrupts.let_go()
    assert steps == ["went on"]


def test_a_handler_installed_between_two_holds_waits_too(alarms: None) -> None:
    for _ in range(3):  # as a time limit does for each of its blocks
        signal.signal(signal.SIGALRM, raise_alarm)
        interrupts.hold()
        signal.raise_signal(signal.SIGALRM)
        with pytest.raises(Alarm):
            interrupts.let_go()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        interrupts.hold()
        interrupts.let_go()
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_neither_of_two_signals_is_lost(alarms: None) -> None:
    interrupts.hold()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGALRM)
    with pytest.raises(Alarm) as raised:
        interrupts.let_go()
    numbers = {raised.value.args[0], raised.value.__context__.args[0]}  # type: ignore[union-attr]
    assert numbers == {signal.SIGTERM, signal.SIGALRM}


def test_exceptions_of_a_handler_are_told_apart_from_others(alarms: None) -> None:
    interrupts.hold()
    interrupts.let_go()
    with pytest.raises(Alarm) as by_handler:
        signal.raise_signal(signal.SIGALRM)
    assert interrupts.is_from_handler(by_handler.value)
    interrupts.restore()  # a handler that no hold has wrapped yet
    with pytest.raises(Alarm) as by_own_handler:
        signal.raise_signal(signal.SIGALRM)
    assert interrupts.is_from_handler(by_own_handler.value)
    assert not interrupts.is_from_handler(SystemExit(1))


def test_main_thread_waits_in_slices_until_the_time_is_over() -> None:
    slices: list[float] = []

    def wait(slice_s: float | None) -> bool:
        assert slice_s is not None
        slices.append(slice_s)
        time.sleep(slice_s)
        return False

    began = time.monotonic()
    interrupts.wait_for(wait, 0.6)
    assert time.monotonic() - began >= 0.6
    assert max(slices) <= 0.25  # a signal that came just before a wait is noticed after it
    assert sum(slices) <= 0.6


def test_wait_without_time_looks_once() -> None:
    looks: list[float | None] = []

    def look(slice_s: float | None) -> bool:
        looks.append(slice_s)
        return False

    interrupts.wait_for(look, 0.0)
    assert looks == [0.0]


def test_other_threads_wait_once_for_as_long() -> None:
    waits: list[float | None] = []

    def wait(slice_s: float | None) -> bool:
        waits.append(slice_s)
        return False

    thread = threading.Thread(target=interrupts.wait_for, args=(wait, 7.0))
    thread.start()
    thread.join()
    assert waits == [7.0]


def interrupt_times(times: int) -> Callable[[], None]:
    """Return a function that interrupts the main thread so often, and never twice at once."""
    handled = threading.Semaphore(0)

    def handler(number: int, frame: object) -> None:
        handled.release()
        raise KeyboardInterrupt

    def send() -> None:
        for _ in range(times):
            interrupt_main()
            assert handled.acquire(timeout=30)

    signal.signal(signal.SIGINT, handler)
    return send


@pytest.mark.parametrize("times", [1, 2])
def test_the_end_of_machines_outlasts_two_interrupts(times: int) -> None:
    send = interrupt_times(times)
    done = threading.Event()

    def end() -> None:
        send()
        time.sleep(0.3)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        interrupts.shielded(end)
    assert done.is_set()


def test_a_third_interrupt_leaves_the_end_of_machines_to_others() -> None:
    send = interrupt_times(3)
    release, done = threading.Event(), threading.Event()

    def end() -> None:
        send()
        release.wait()
        done.set()

    with pytest.raises(KeyboardInterrupt):
        interrupts.shielded(end)
    assert not done.is_set()
    release.set()
    assert done.wait(60)


def test_an_interrupted_wait_does_not_take_a_thread_for_ended() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    threading.Timer(0.1, interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        while not interrupts.has_ended(thread):
            continue
    assert not interrupts.has_ended(thread, 0.01)
    release.set()
    assert interrupts.has_ended(thread, 10.0)
