"""Delivery of events: every reader gets all of them in order, and a slow one delays nobody."""

from __future__ import annotations

import gc
import threading

import pytest

from skyward.console.announcer import Announcer
from skyward.errors import UsageError
from skyward.events import Event, EventsDropped, NodeReady
from tests.waiting import until


def test_each_reader_has_all_events_in_order() -> None:
    announcer = Announcer()
    first, second = announcer.listen(), announcer.listen()
    told = [NodeReady(node=n) for n in range(5)]
    for event in told:
        announcer.emit(event)
    announcer.close()
    assert list(first) == told
    assert list(second) == told


def test_a_slow_reader_loses_the_oldest_and_learns_how_many() -> None:
    announcer = Announcer()
    stream = announcer.listen(limit=3)
    for n in range(10):
        announcer.emit(NodeReady(node=n))
    announcer.close()
    assert list(stream) == [EventsDropped(count=7), *(NodeReady(node=n) for n in (7, 8, 9))]
    assert stream.dropped == 7


def test_a_reader_that_waits_ends_when_the_pool_is_closed() -> None:
    announcer = Announcer()
    stream = announcer.listen()
    seen: list[Event] = []
    readers = [threading.Thread(target=lambda: seen.extend(stream)) for _ in range(3)]
    for reader in readers:
        reader.start()
    announcer.emit(NodeReady(node=1))
    announcer.close()
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive()
    assert seen == [NodeReady(node=1)]


def test_a_reader_may_wait_with_a_timeout() -> None:
    announcer = Announcer()
    stream = announcer.listen()
    assert stream.get(0.01) is None
    announcer.emit(NodeReady(node=1))
    assert stream.get(10) == NodeReady(node=1)
    announcer.close()
    assert stream.get() is None


def test_the_source_learns_when_the_first_reader_comes_and_the_last_has_gone() -> None:
    heard: list[bool] = []
    announcer = Announcer(on_heard=heard.append)
    first, second = announcer.listen(), announcer.listen()
    assert (heard, announcer.is_heard) == ([True], True)
    first.close()
    del second
    gc.collect()
    announcer.emit(NodeReady(node=1))
    assert (heard, announcer.is_heard) == ([True, False], False)


def test_a_function_that_raises_is_reported_once_and_called_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def fail(event: Event) -> None:
        seen.append(event)
        raise ValueError("not today")

    announcer = Announcer(fail)
    announcer.open()
    for n in range(3):
        announcer.emit(NodeReady(node=n))
    announcer.close()
    assert len(seen) == 3
    assert caplog.text.count("ValueError: not today") == 1


def test_a_function_may_end_the_pool_it_listens_to() -> None:
    closed = threading.Event()

    def close(event: Event) -> None:
        announcer.close()
        closed.set()

    announcer = Announcer(close)
    announcer.open()
    announcer.emit(NodeReady(node=1))
    until(closed.is_set)


def test_objects_other_than_functions_are_refused() -> None:
    with pytest.raises(UsageError, match="on_event=3: must be a function"):
        Announcer(3)  # type: ignore[arg-type]
