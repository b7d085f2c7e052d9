"""kill -9 of each of our processes, on a real host and beside the client, under every kind of call."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import NodeLost, SlotLost
from skyward.ssh.connect import Transport
from tests.hosts.faults import Ledger, Place, Role, client_processes, gang_of, kill, noted, pids
from tests.waiting import until

pytestmark = pytest.mark.hosts

Places = Callable[[int], Place]
NewLedger = Callable[[Place], Ledger]

ON_THE_WAY: tuple[Role, ...] = ("stub", "sshd")
"""Their death is a link that broke: nothing may be lost by it."""
OF_THE_NODE: tuple[Role, ...] = ("agent", "watchdog", "standby")


@pytest.mark.parametrize(
    "roles", [ON_THE_WAY, ("slot", "zygote"), OF_THE_NODE], ids=["on the way", "of the calls", "of the node"]
)
def test_plain_calls_run_at_most_once_and_lost_ones_are_named(
    place: Places, ledger_of: NewLedger, roles: tuple[Role, ...]
) -> None:
    here = place(1)
    with here.pool(concurrency=2) as pool:
        for role in roles:
            check_plain_calls(here, ledger_of(here), pool, role)


def check_plain_calls(here: Place, ledger: Ledger, pool: sky.ComputePool, role: Role) -> None:
    """Kill processes of one kind under calls, and check what becomes of the calls. The pool goes on."""
    endless = () if role in ON_THE_WAY else (10, 11)  # both slots are in a call when they die
    call = noted(ledger.path, 0.02, endless)
    futures = {n: ledger.submit(call(n) > pool, n) for n in range(100)}
    until(lambda: len(ledger.ran()) >= 12)
    kill(here.hosts[0], role)
    losses = ledger.settle(futures)
    ran = ledger.ran()
    assert max(ran.values()) == 1
    assert all(ran[n] for n, error in losses.items() if error.started is True)
    if role in ON_THE_WAY:
        assert not losses
    elif role in OF_THE_NODE:
        assert {type(error) for error in losses.values()} == {NodeLost}
        assert set(endless) <= set(losses)
        assert len(losses) < 60, "what was never sent moves to the successor"
    else:
        assert {type(error) for error in losses.values()} == {SlotLost}
        assert set(losses) == set(endless), "of each slot the call that it had begun"


def test_with_retries_every_call_is_answered_once_whatever_dies(place: Places, ledger_of: NewLedger) -> None:
    here = place(2)
    ledger = ledger_of(here)
    call = noted(ledger.path, 0.02).with_options(retries=20)
    roles: list[Role] = ["slot", "zygote", "stub", "agent", "sshd", "watchdog"]
    with here.pool(concurrency=2) as pool:
        futures = {n: ledger.submit(call(n) > pool, n) for n in range(400)}
        for turn, role in enumerate(roles):
            until(lambda turn=turn: len(ledger.ran()) >= 40 * (turn + 1), within_s=60)  # type: ignore[misc]
            kill(here.hosts[turn % 2], role)
        assert ledger.settle(futures) == {}


def test_a_map_is_complete_whatever_dies(place: Places, ledger_of: NewLedger) -> None:
    here = place(2)
    ledger = ledger_of(here)
    call = noted(ledger.path, 0.002).with_options(retries=20)
    roles: list[Role] = ["stub", "slot", "watchdog", "zygote", "sshd", "agent"]
    with here.pool(concurrency=2) as pool:
        values = pool.imap(call, range(4000))
        got: list[int] = []
        for turn, role in enumerate(roles):
            got.extend(next(values) for _ in range(200))
            kill(here.hosts[turn % 2], role)
        got.extend(values)
    assert got == list(range(4000))


@pytest.mark.parametrize("role", ["slot", "agent"])
def test_a_map_without_retries_names_its_lost_calls(place: Places, ledger_of: NewLedger, role: Role) -> None:
    here = place(2)
    ledger = ledger_of(here)
    with here.pool(concurrency=2) as pool:
        values = pool.imap(noted(ledger.path, 0.005), range(1000), return_exceptions=True)
        got = [next(values) for _ in range(100)]
        kill(here.hosts[0], role)
        got.extend(values)
    ran = ledger.ran()
    assert max(ran.values()) == 1
    assert len(got) == 1000
    lost = {n: value for n, value in enumerate(got) if value != n}
    assert {type(error) for error in lost.values()} <= {SlotLost if role == "slot" else NodeLost}
    assert set(range(1000)) - set(lost) <= set(ran)
    if role == "slot":
        assert len(lost) <= 2, "of each slot the call that it had begun"


@pytest.mark.parametrize("role", ["slot", "agent", "stub"])
def test_a_generator_goes_on_or_gives_the_reason(place: Places, role: Role) -> None:
    @sky.compute
    def doubled(items: Iterator[int]) -> Iterator[int]:
        for item in items:
            time.sleep(0.002)
            yield 2 * item

    here = place(1)
    got: list[int] = []
    with here.pool() as pool:
        values = doubled(iter(range(600))) >> pool
        got.extend(next(values) for _ in range(100))
        kill(here.hosts[0], role)
        if role in ON_THE_WAY:
            got.extend(values)
            assert len(got) == 600
        else:
            with pytest.raises(NodeLost if role in OF_THE_NODE else SlotLost):
                for value in values:
                    got.append(value)  # what came before the error counts
        assert list(doubled(iter(range(3))) >> pool) == [0, 2, 4]
    assert got == [2 * n for n in range(len(got))]


@pytest.mark.parametrize("role", ["slot", "zygote", "agent", "sshd"])
def test_a_gang_fails_as_one_or_goes_on(place: Places, ledger_of: NewLedger, role: Role) -> None:
    here = place(2)
    ledger = ledger_of(here)
    path = ledger.path

    def rank(seconds: float) -> int:
        node = sky.instance_info().node  # type: ignore[union-attr]  # pytest is not on the nodes: no assert here
        with open(path, "a") as file:
            file.write(f"{node}\n")
        time.sleep(seconds)
        return node

    gang = gang_of(rank)
    is_broken_link = role in ON_THE_WAY
    with here.pool() as pool, ThreadPoolExecutor(1) as threads:
        outcome = threads.submit(lambda: gang(4.0 if is_broken_link else 600.0) @ pool)
        until(lambda: outcome.done() or len(ledger.ran()) == 2)
        assert not outcome.done(), outcome.exception()
        idle = len(pids(here.hosts[0], "slot")) - 1
        kill(here.hosts[1], role)
        if is_broken_link:
            assert outcome.result(100) == [0, 1]
        else:
            with pytest.raises(NodeLost if role in OF_THE_NODE else SlotLost, match="node 1"):
                outcome.result(100)
            until(lambda: len(pids(here.hosts[0], "slot")) <= idle)  # the other rank is ended
        recovered(pool)
        assert gang(0.0) @ pool == [0, 1]


def recovered(pool: sky.ComputePool) -> None:
    """Wait until its nodes are back. A broadcast that comes before the loss was noticed fails too."""
    for _ in range(3):
        with contextlib.suppress(NodeLost, SlotLost):
            sky.compute(os.getpid)() @ pool
            return


# Beside the client --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "which"),
    [
        ("openssh", "master"),
        ("openssh", "channel"),
        ("openssh", "keeper"),
        ("paramiko", "master"),
        ("paramiko", "channel"),
    ],
)
def test_the_death_of_a_process_beside_the_client_loses_nothing(
    place: Places, ledger_of: NewLedger, runtime: Path, transport: Transport, which: str
) -> None:
    here = place(1)
    ledger = ledger_of(here)
    call = noted(ledger.path, 0.06)
    # The lease is long enough for a loaded machine to connect again, and the calls take longer than the lease.
    with here.pool(lease_s=10.0, transport=transport, concurrency=2) as pool:
        agents = pool.agent_pids()
        futures = {n: ledger.submit(call(n) > pool, n) for n in range(400)}
        until(lambda: len(ledger.ran()) >= 10)
        until(lambda: client_processes(runtime)[which])
        for pid in client_processes(runtime)[which]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert ledger.settle(futures) == {}
        assert set(ledger.ran().values()) == {1}
        assert pool.agent_pids() == agents
    until(lambda: not client_processes(runtime)["master"])


def test_all_processes_between_client_and_nodes_may_die_repeatedly(
    place: Places, ledger_of: NewLedger, runtime: Path
) -> None:
    here = place(2)
    ledger = ledger_of(here)
    call = noted(ledger.path, 0.01)
    with here.pool(concurrency=2) as pool:
        futures = {n: ledger.submit(call(n) > pool, n) for n in range(400)}
        for turn in range(5):
            until(lambda turn=turn: len(ledger.ran()) >= 30 * (turn + 1), within_s=60)  # type: ignore[misc]
            until(lambda: all(client_processes(runtime).values()), within_s=60)
            for pid in [pid for found in client_processes(runtime).values() for pid in found]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert ledger.settle(futures) == {}
        assert set(ledger.ran().values()) == {1}
