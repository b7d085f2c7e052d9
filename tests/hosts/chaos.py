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
from skyward.errors import ProviderError
from tests.chaos.load import Load, count
from tests.chaos.schedule import Fault, Injector, Struck, plan
from tests.hosts.bed import Bed
from tests.hosts.faults import Ledger, Place, Role, client_processes, pids, ray_processes
from tests.hosts.host import Host
from tests.waiting import until

__all__ = ["ELASTIC_NODES", "ELASTIC_WEIGHTS", "NOTICE_FILE", "RAY_WEIGHTS", "WEIGHTS", "Chaos"]

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
ELASTIC_WEIGHTS = {**RAY_WEIGHTS, "notice node": 2, "scale pool": 4}
ELASTIC_NODES = 2, 3
"""Bounds of a pool that faults scale."""
PAUSE_S = 1.0
NOTICE_FILE = "/run/skyward-notice"
"""File on a host that announces that its machine is taken back, if the pool's nodes were told to look for it."""
NOTICE_S, SCALE_S = 2.0, 120.0


class HostFaults:
    """Faults that are carried out on the hosts of a pool, and on the connections that lead there."""

    def __init__(self, pool: sky.ComputePool, place: Place, runtime: Path) -> None:
        self._pool = pool
        self._place = place
        self._runtime = runtime
        self._scaling: list[threading.Thread] = []
        self._errors: list[Exception] = []

    def __call__(self, fault: Fault, struck: Struck) -> None:
        host = self._place.hosts[fault.node]
        match fault.kind.split():
            case "cut", line:
                with host.link_cut() if line == "cable" else hidden(host, self._place.hosts[fault.node - 1]):
                    time.sleep(2.0)
            case "notice", _:
                host.write(NOTICE_FILE, "terminate")
                time.sleep(NOTICE_S)
                host.path(NOTICE_FILE).unlink()  # the next node there is on another machine, as it were
            case "scale", _:
                self._scale(ELASTIC_NODES[fault.node % len(ELASTIC_NODES)])
            case _, role:
                self._kill(self._victims(host, role, struck))

    def _victims(self, host: Host, role: str, struck: Struck) -> list[int]:
        """Return the processes to be killed, and note what goes with them. There are none while one is replaced."""
        if role == "master":
            return client_processes(self._runtime)["master"][:1]
        if role not in _ROLES:
            return [pid for each in self._place.hosts for pid in ray_processes(each, role)][:1]
        victims = pids(host, _ROLES[role])
        if role == "head":  # there is one, on any of the hosts
            victims = [head for each in self._place.hosts for head in pids(each, "head")]
        if victims and role in ("agent", "watchdog", "head"):
            struck.nodes += 1
        elif victims and role == "zygote":
            struck.slots += len(pids(host, "slot"))
        elif victims and role == "slot":
            struck.slots += 1
            victims = victims[-1:]
        return [process.outside_pid for process in victims]

    def finish(self) -> None:
        """Wait until the pool has its last number of nodes. Raises AssertionError if a change has failed."""
        for scaling in self._scaling:
            scaling.join(SCALE_S)
        assert not any(scaling.is_alive() for scaling in self._scaling), f"not scaled within {SCALE_S:g} s"
        assert not self._errors, self._errors

    def _scale(self, nodes: int) -> None:
        """Begin to bring the pool to a number of nodes: further faults come while it changes."""

        def scale() -> None:
            try:
                self._pool.scale(nodes)
            except ProviderError:  # a fault has struck the new node
                pass
            except Exception as error:
                self._errors.append(error)

        self._scaling.append(threading.Thread(target=scale, daemon=True))
        self._scaling[-1].start()

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
        gang_nodes: Nodes of each gang; None: all that the pool has.
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
        gang_nodes: int | None = None,
    ) -> None:
        self._place, self._ledger = here, ledger
        self._seed, self._weights = seed, weights
        self._strike = HostFaults(pool, here, runtime)
        self._load = Load(pool, ledger.path, seed, gang_nodes)
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
        self._strike.finish()
        self._struck = injector.struck
        assert injector.error is None, injector.error
        until(lambda: all(host.answers_ssh() for host in self._place.hosts))

    def check(self) -> str:
        """Compare what the client was told with what ran. Returns a summary. Raises AssertionError."""
        began = count([host.read(self._ledger.path) for host in self._place.hosts])
        self._load.books.check(began, self._struck)
        return f"seed {self._seed}: {len(self._struck.faults)} faults, {self._load.books}"
