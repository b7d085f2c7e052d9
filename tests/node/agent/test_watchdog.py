"""The watchdog tells a keeper that is gone from a machine that stood still."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.node.agent import watchdog

STANDBY = 7


class Machine:
    """Machine whose time passes only in the watchdog's waits, by the amounts in `waits`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
        self.now = 100.0
        self.killed: list[int] = []
        self.parent = STANDBY
        self._waits = waits
        clock = SimpleNamespace(monotonic=lambda: self.now)
        system = SimpleNamespace(
            WNOHANG=os.WNOHANG,
            waitpid=lambda pid, flags: (0, 0),
            kill=lambda pid, number: self.killed.append(pid),
            getppid=lambda: self.parent,
        )
        monkeypatch.setattr(watchdog, "time", clock)
        monkeypatch.setattr(watchdog, "os", system)
        # The real watchdog sleeps in a system call, by the real clock.
        monkeypatch.setattr(watchdog, "_wait_for_child", self._wait)

    def _wait(self, limit_s: float) -> None:
        if not self._waits:
            raise KeyboardInterrupt
        self.now += self._waits.pop(0)


def watch(lease: watchdog.Lease) -> Any:
    try:
        return watchdog._watch(1, lease, STANDBY)  # `guard` around it forks, and this clock is not in the child
    except KeyboardInterrupt:
        return None


def test_a_lease_that_ran_out_while_the_machine_stood_still_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [0.25, 60.0, 0.25])
    assert watch(watchdog.Lease(2.0)) is None
    assert not machine.killed


def test_a_lease_that_runs_out_while_the_watchdog_runs_ends_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [60.0] + [0.25] * 20)
    assert watch(watchdog.Lease(2.0)) == 3
    assert machine.killed == [1]


def test_a_lease_begins_with_the_first_contact_or_when_the_starter_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    machine = Machine(monkeypatch, [0.25] * 20)
    try:
        lease = watchdog.Lease(2.0, starter=writer)
        assert watch(lease) is None
        assert lease.is_starting
        greeted = watchdog.Lease(2.0, starter=writer)
        greeted.contact()
        assert not greeted.is_starting
        os.close(reader)
        assert not lease.is_starting
        machine = Machine(monkeypatch, [0.25] * 20)
        assert watch(watchdog.Lease(2.0, starter=writer)) == 3
        assert machine.killed == [1]
    finally:
        os.close(writer)


def test_a_standby_that_is_gone_ends_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [0.25])
    machine.parent = 1
    assert watch(watchdog.Lease(2.0)) == 3
    assert machine.killed == [1]
