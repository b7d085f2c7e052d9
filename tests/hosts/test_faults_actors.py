"""Actors on real hosts: their process, agent, node or link dies while calls of the program or of a task are open."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

import skyward as sky
from skyward.errors import ActorLost
from tests.hosts.faults import EPSILON_S, Ledger, Place, kill, nothing_runs_on
from tests.hosts.host import Host
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

Places = Callable[[int], Place]
NewLedger = Callable[[Place], Ledger]
ON_THE_WAY = ("stub", "sshd")


def journal() -> Any:
    """Return the class of an actor that enters its calls in the ledger, made here so that it travels by value."""

    class Journal:
        def __init__(self, path: str) -> None:
            self.path = path
            self.numbers: list[int] = []

        def enter(self, number: int, seconds: float = 0.0, data: Any = None) -> int:
            with open(self.path, "a") as file:
                file.write(f"{number}\n")
            self.numbers.append(number)
            time.sleep(seconds)
            return number

        def entered(self) -> list[int]:
            return self.numbers

        def pid(self) -> int:
            return os.getpid()

    return sky.actor(Journal)


def kill_actor(host: Host, pid: int) -> None:
    """Kill one process of a host, by its number there."""
    for process in host.processes():
        if process.pid == pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.outside_pid, signal.SIGKILL)


@pytest.mark.parametrize("role", ["actor", "agent", "watchdog", "stub", "sshd"])
def test_each_call_runs_at_most_once_and_lost_ones_say_why(place: Places, ledger_of: NewLedger, role: Any) -> None:
    here = place(1)
    ledger = ledger_of(here)
    with here.pool() as pool:
        actor = journal()(ledger.path) >> pool
        pid = actor.pid() >> pool
        futures = {n: ledger.submit(actor.enter(n, 0.02) > pool, n) for n in range(150)}
        until(lambda: len(ledger.ran()) >= 10)
        if role == "actor":
            kill_actor(here.hosts[0], pid)
        else:
            kill(here.hosts[0], role)
        losses = ledger.settle(futures)
        ran = ledger.ran()
        assert max(ran.values()) == 1
        if role in ON_THE_WAY:
            assert not losses
            assert actor.entered() >> pool == list(range(150))
            return
        assert {type(error) for error in losses.values()} == {ActorLost}
        assert sorted(losses) == list(range(min(losses), 150)), "all calls from the lost one on"
        assert not [n for n, error in losses.items() if error.started is False and ran[n]]
        with pytest.raises(ActorLost):
            actor.pid() >> pool


def test_a_killed_actor_restarts_and_loses_only_what_had_begun(place: Places, ledger_of: NewLedger) -> None:
    here = place(1)
    ledger = ledger_of(here)
    with here.pool() as pool:
        actor = journal().with_options(max_restarts=2)(ledger.path) >> pool
        pid = actor.pid() >> pool
        futures = {n: ledger.submit(actor.enter(n, 0.02) > pool, n) for n in range(100)}
        until(lambda: len(ledger.ran()) >= 10)
        kill_actor(here.hosts[0], pid)
        losses = ledger.settle(futures)
        assert len(losses) == 1
        assert set(ledger.ran().values()) == {1}
        entered = actor.entered() >> pool
        assert entered == list(range(min(losses) + 1, 100)), "in order, by the second object"


def test_an_actor_of_a_host_without_power_restarts_on_the_other(place: Places, ledger_of: NewLedger) -> None:
    here = place(2)
    ledger = ledger_of(here)
    lost, other = here.hosts
    with here.pool(lease_s=4.0) as pool:
        actor = journal().with_options(max_restarts=1)(ledger.path) >> pool
        futures = {n: ledger.submit(actor.enter(n, 0.05) > pool, n) for n in range(200)}
        until(lambda: len(ledger.ran()) >= 10)
        with lost.link_cut():
            nothing_runs_on([lost], 4.0 + EPSILON_S)
            losses = ledger.settle(futures)
        assert {type(error) for error in losses.values()} == {ActorLost}
        assert len(losses) < 100, "no more than what had been sent"
        assert max(ledger.ran().values()) == 1
        assert other.started_processes() != []


def test_a_cut_link_is_only_a_pause_for_calls_of_the_program_and_of_a_task(place: Places, ledger_of: NewLedger) -> None:
    @sky.compute
    def enter_all(actor: Any, pool: Any) -> list[int]:
        block = bytes(800_000)
        futures = [actor.enter(number, 0.01, None if number % 7 else block) > pool for number in range(1000, 1200)]
        return [future.result(120) for future in futures]

    here = place(2)
    ledger = ledger_of(here)
    with here.pool(lease_s=30.0) as pool:
        actor = journal()(ledger.path) >> pool.node(0)
        task = enter_all(actor, pool) > pool.node(1)
        futures = {n: ledger.submit(actor.enter(n, 0.01) > pool, n) for n in range(200)}
        until(lambda: len(ledger.ran()) >= 10)
        with here.hosts[0].link_cut(), here.hosts[1].link_cut():
            time.sleep(5)
        assert ledger.settle(futures) == {}
        assert task.result(120) == list(range(1000, 1200))
        entered = actor.entered() >> pool
        assert [n for n in entered if n < 1000] == list(range(200))
        assert [n for n in entered if n >= 1000] == list(range(1000, 1200))


@pytest.mark.parametrize("end", ["process", "node"])
def test_a_task_on_another_host_learns_that_its_actor_died(place: Places, ledger_of: NewLedger, end: str) -> None:
    @sky.compute
    def enter_long(actor: Any, pool: Any) -> str:
        try:
            actor.enter(1, 600.0) >> pool
        except Exception as error:
            return type(error).__name__
        return ""

    here = place(2)
    ledger = ledger_of(here)
    with here.pool() as pool:
        actor = journal()(ledger.path) >> pool.node(0)
        pid = actor.pid() >> pool
        task = enter_long(actor, pool) > pool.node(1)
        until(ledger.ran)
        if end == "process":
            kill_actor(here.hosts[0], pid)
        else:
            kill(here.hosts[0], "agent")
        assert task.result(90) == "ActorLost"


def test_a_dead_task_leaves_neither_calls_nor_its_actor(place: Places, ledger_of: NewLedger) -> None:
    @sky.compute
    def hold(actor: Any, pool: Any) -> None:
        futures = [actor.enter(1, 600.0) > pool, actor.enter(2) > pool]
        futures[0].result()

    here = place(2)
    ledger = ledger_of(here)
    with here.pool(cancel_grace_s=1.0) as pool:
        task = hold(journal()(ledger.path) >> pool.node(0), pool) > pool.node(1)
        until(ledger.ran)
        assert " actors=1 " in repr(pool)
        kill(here.hosts[1], "slot")
        with pytest.raises(sky.errors.SlotLost):
            task.result(60)
        until(lambda: " actors=" not in repr(pool), within_s=60)
        assert ledger.ran() == {1: 1}
