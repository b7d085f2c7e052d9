"""A user's signal handler that raises, at any moment, interrupts only the call during which it ran."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

import pytest

import skyward as sky

_ROUNDS = 300


class TimeIsUp(Exception):
    pass


class Alarm:
    """Timer that sends SIGUSR1 a moment after it is set. Its handler raises as long as it is set."""

    def __init__(self) -> None:
        self.is_set = self.is_over = False
        self._asked = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_set, self.is_over = False, True
        self._asked.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            self.is_set = False
            raise TimeIsUp

    def _send(self) -> None:
        main, delays = threading.main_thread().ident, random.Random(3)
        assert main is not None
        while not self.is_over:
            self._asked.wait()
            self._asked.clear()
            time.sleep(delays.uniform(0, 0.0004))
            signal.pthread_kill(main, signal.SIGUSR1)

    def set(self) -> None:
        self._asked.set()
        self.is_set = True


@sky.compute
def double(x: int) -> int:
    return 2 * x


@pytest.fixture
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=1, concurrency=2, logs=False)


def test_calls_of_other_threads_go_on_while_a_handler_raises_in_calls_of_the_main_thread(pool: sky.ComputePool) -> None:
    wrong: list[object] = []
    is_over = threading.Event()

    def call() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            futures = [double(number) > pool, double(-number) > pool]
            if [future.result(timeout=60) for future in futures] != [2 * number, -2 * number]:
                wrong.append(number)

    beside = threading.Thread(target=call)
    interrupted = 0
    with Alarm() as alarm:
        beside.start()
        try:
            for number in range(_ROUNDS):
                try:
                    alarm.set()
                    assert double(number) >> pool == 2 * number
                    alarm.is_set = False
                except TimeIsUp:
                    interrupted += 1
        finally:
            is_over.set()
            beside.join(timeout=60)
    assert not beside.is_alive()
    assert not wrong
    assert interrupted
    assert [double(i) >> pool for i in range(4)] == [0, 2, 4, 6]


class Ringing(int):
    """Argument during whose pickling a signal arrives."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        signal.raise_signal(signal.SIGUSR1)
        return int, ()


def test_a_handler_that_raises_while_an_argument_is_pickled_is_no_fault_of_the_argument(pool: sky.ComputePool) -> None:
    with Alarm() as alarm:
        for run in (
            lambda: double(Ringing()) >> pool,
            lambda: double(Ringing()) > pool,
            lambda: pool.map(double, [Ringing()]),
            lambda: pool.put(Ringing()),
        ):
            alarm.is_set = True
            with pytest.raises(TimeIsUp):
                run()
    assert double(2) >> pool == 4
