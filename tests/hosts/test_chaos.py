"""Random kills, pauses and cut cables under every kind of call, on SSH hosts. For this machine, see tests/chaos."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.load import Load, count
from tests.chaos.schedule import Fault, Injector, Struck, plan, seconds, seeds
from tests.hosts.faults import Ledger, Place, Role, client_processes, pids
from tests.waiting import until

pytestmark = pytest.mark.hosts

WEIGHTS = {
    "kill slot": 5,
    "kill zygote": 2,
    "kill agent": 1,
    "kill watchdog": 1,
    "kill stub": 3,
    "kill sshd": 3,
    "kill master": 2,
    "cut cable": 2,
}
ROUND_S = 14.0
PAUSE_S = 1.0


class HostFaults:
    """Faults that are carried out on the hosts of a pool, and on the connections that lead there."""

    def __init__(self, place: Place, runtime: Path) -> None:
        self._place = place
        self._runtime = runtime

    def __call__(self, fault: Fault, struck: Struck) -> None:
        host = self._place.hosts[fault.node]
        action, role = fault.kind.split()
        if action == "cut":
            with host.link_cut():
                time.sleep(2.0)
            return
        if role == "master":
            self._kill(client_processes(self._runtime)["master"][:1])
            return
        victims = pids(host, _ROLES[role])
        slots = len(pids(host, "slot"))
        if not victims:  # just being replaced
            return
        if role in ("agent", "watchdog"):
            struck.nodes += 1
        elif role == "zygote":
            struck.slots += slots
        elif role == "slot":
            struck.slots += 1
            victims = victims[-1:]
        self._kill([process.outside_pid for process in victims])

    def _kill(self, victims: list[int]) -> None:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_ROLES: dict[str, Role] = {
    "slot": "slot",
    "zygote": "zygote",
    "agent": "agent",
    "watchdog": "watchdog",
    "stub": "stub",
    "sshd": "sshd",
}


@pytest.mark.parametrize("seed", seeds([1]))
@pytest.mark.timeout(0)  # each round has its own limits
def test_nothing_acknowledged_is_lost_doubled_or_left_on_hosts(
    seed: int, place: Callable[[int], Place], ledger_of: Callable[[Place], Ledger], runtime: Path
) -> None:
    here = place(2)
    deadline = time.monotonic() + seconds(ROUND_S)
    for number in range(10_000):
        run_round(seed + 1000 * number, here, ledger_of(here), runtime)
        if time.monotonic() >= deadline:
            return


def run_round(seed: int, here: Place, ledger: Ledger, runtime: Path) -> None:
    faults = plan(seed, weights=WEIGHTS, nodes=len(here.hosts), length=int(ROUND_S / PAUSE_S), pause_s=PAUSE_S)
    stop = threading.Event()
    with here.pool(concurrency=2) as pool:  # checks at its end that nothing runs on the hosts
        load = Load(pool, ledger.path, seed)
        injector = Injector(faults, HostFaults(here, runtime), stop)
        injector.start()
        injector.join(4 * ROUND_S)
        stop.set()
        load.finish()
        assert injector.error is None, injector.error
        until(lambda: all(host.answers_ssh() for host in here.hosts))
    began = count([host.read(ledger.path) for host in here.hosts])
    load.books.check(began, injector.struck)
    print(f"seed {seed}: {len(injector.struck.faults)} faults, {load.books}")
