"""Outlets: items come out in order, and a stalled reader loses items and blocks nothing."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from skyward.console import outlet as outlet_module
from skyward.console.outlet import Outlet, notices, notify
from tests.waiting import until


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let callers wait as long as a busy machine needs for an outlet's thread."""
    for limit in ("_STALLED_S", "_SLOW_S", "_LAST_WORDS_S"):
        monkeypatch.setattr(outlet_module, limit, 60.0)


class Reader:
    """A sink that stands still while `gate` is closed."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_stuck = threading.Event()

    def __call__(self, items: list[str]) -> None:
        if not self.gate.is_set():
            self.is_stuck.set()
            self.gate.wait(60)
        self.items += items


def outlet_to(reader: Reader, **how: int) -> Outlet[str]:
    return Outlet(reader, size=len, dropped=lambda count, _: f"{count} dropped", label="the reader", **how)


@pytest.mark.usefixtures("patient")
def test_all_items_come_out_in_order_before_flush_returns() -> None:
    reader = Reader()
    outlet = outlet_to(reader)
    for number in range(10_000):
        outlet.put(str(number))
    assert outlet.flush()
    assert reader.items == [str(number) for number in range(10_000)]


@pytest.mark.usefixtures("patient")
def test_a_caller_that_waits_for_an_item_finds_it_written() -> None:
    reader = Reader()
    outlet = outlet_to(reader)
    for number in range(500):
        assert outlet.wait(outlet.put(str(number)))
        assert reader.items[-1] == str(number)


def test_a_stalled_reader_loses_the_oldest_counted_and_blocks_nobody() -> None:
    reader = Reader()
    outlet = outlet_to(reader, limit=10 * 201, batch=1)
    reader.gate.clear()
    outlet.put("0")
    assert reader.is_stuck.wait(60)
    began = time.monotonic()
    last = 0
    for number in range(1, 101):
        last = outlet.put(str(number % 10))
        outlet.wait(last)
    assert time.monotonic() - began < 25, "only the first wait finds out that the reader has stalled"
    assert not outlet.wait(last)
    reader.gate.set()
    assert outlet.flush()
    assert reader.items == ["0", "90 dropped", *(str(number % 10) for number in range(91, 101))]


@pytest.mark.usefixtures("patient")
def test_a_sink_that_raises_is_reported_once_and_gets_no_further_items(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[list[str]] = []

    def fail(items: list[str]) -> None:
        calls.append(items)
        sys.exit("not today")

    outlet = Outlet(fail, size=len, dropped=lambda count, _: f"{count} dropped", label="the reader")
    for _ in range(3):
        outlet.wait(outlet.put("x"))
    assert outlet.flush()
    assert calls == [["x"]]
    assert caplog.text.count("SystemExit: not today") == 1


@pytest.mark.usefixtures("patient")
def test_the_thread_ends_when_nothing_comes_and_starts_again() -> None:
    before = set(threading.enumerate())
    reader = Reader()
    outlet = outlet_to(reader)
    for word in ("first", "second"):
        outlet.wait(outlet.put(word))
        assert reader.items[-1] == word
        until(lambda: not {t for t in threading.enumerate() if t.name == "skyward-outlet"} - before)


@pytest.mark.usefixtures("patient")
def test_without_a_thread_nothing_raises_or_waits_and_the_next_item_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reader = Reader()
    outlet = outlet_to(reader)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not outlet.wait(outlet.put("first"))
        assert not outlet.flush()
    assert outlet.wait(outlet.put("second"))
    assert reader.items == ["first", "second"]


@pytest.mark.usefixtures("patient")
def test_a_notice_goes_to_the_current_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert notices.wait(notify("hello"))
    assert capsys.readouterr() == ("", "skyward: hello\n")
