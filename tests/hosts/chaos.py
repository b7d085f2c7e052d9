"""Random faults on hosts: which there are, how one is carried out, and a schedule of them under every kind of call."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import skyward as sky
from tests.chaos.load import Load, count
from tests.chaos.schedule import Fault, Injector, Struck, plan
from tests.hosts.bed import Bed
from tests.hosts.faults import Ledger, Place, Role, client_processes, pids, ray_processes
from tests.hosts.host import Host
from tests.waiting import until

__all__ = ["RAY_WEIGHTS", "WEIGHTS", "Chaos"]

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
RAY_WEIGHTS = {
    **WEIGHTS,
    "kill ray::Bridge": 3,
    "kill ray.driver": 2,
    "kill raylet/raylet": 1,
    "kill gcs_server": 1,
    "kill ray::DashboardAgent": 1,
    "kill head": 1,
    "cut peer": 2,
}
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
            with host.link_cut() if role == "cable" else hidden(host, self._place.hosts[fault.node - 1]):
                time.sleep(2.0)
            return
        if role not in _ROLES and role != "master":
            self._kill([pid for each in self._place.hosts for pid in ray_processes(each, role)][:1])
            return
        if role == "master":
            self._kill(client_processes(self._runtime)["master"][:1])
            return
        victims = pids(host, _ROLES[role])
        if role == "head":  # there is one, on any of the hosts
            victims = [head for each in self._place.hosts for head in pids(each, "head")]
        slots = len(pids(host, "slot"))
        if not victims:  # just being replaced
            return
        if role in ("agent", "watchdog", "head"):
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
    "head": "head",
}


@contextlib.contextmanager
def hidden(host: Host, other: Host | Bed) -> Iterator[None]:
    """Keep a host apart from another one, or from this machine, for the length of the block."""
    host.hide_from(other.address)
    try:
        yield
    finally:
        host.show_to_all()


class Chaos:
    """A schedule of faults under load on one pool. Make it, `strike`, and `check` when the pool is closed or at rest.

    Args:
        pool: Open pool on the hosts.
        here: Hosts of the pool.
        ledger: File on each host where calls note that they began.
        runtime: Folder of the client's connections.
        seed: Number that the faults are drawn from.
        weights: How often each kind of fault comes.
    """

    def __init__(
        self,
        pool: sky.ComputePool,
        here: Place,
        ledger: Ledger,
        runtime: Path,
        *,
        seed: int,
        weights: Mapping[str, int],
    ) -> None:
        self._place, self._ledger = here, ledger
        self._seed, self._weights = seed, weights
        self._strike = HostFaults(here, runtime)
        self._load = Load(pool, ledger.path, seed)
        self._struck = Struck()

    def strike(self, seconds: float) -> None:
        """Carry out faults for so long, let the load end, and wait until all hosts answer."""
        stop = threading.Event()
        length = int(seconds / PAUSE_S)
        nodes = len(self._place.hosts)
        faults = plan(self._seed, weights=self._weights, nodes=nodes, length=length, pause_s=PAUSE_S)
        injector = Injector(faults, self._strike, stop)
        injector.start()
        injector.join(4 * seconds)
        stop.set()
        self._load.finish()
        self._struck = injector.struck
        assert injector.error is None, injector.error
        until(lambda: all(host.answers_ssh() for host in self._place.hosts))

    def check(self) -> str:
        """Compare what the client was told with what ran. Returns a summary. Raises AssertionError."""
        began = count([host.read(self._ledger.path) for host in self._place.hosts])
        self._load.books.check(began, self._struck)
        return f"seed {self._seed}: {len(self._struck.faults)} faults, {self._load.books}"
