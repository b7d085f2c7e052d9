"""Common parts of the tests of faults on hosts: pools there, processes on both sides, and books of the runs.

A task writes a line to the ledger, a file of its node's disk, when it begins. So the ledger shows from outside which
tasks ran, and the client's results are compared with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import skyward as sky
from skyward.errors import NodeError
from skyward.integrations.base import integrate
from skyward.ssh.connect import Transport
from tests.hosts.bed import Bed
from tests.hosts.host import Host, Process
from tests.hosts.index import PackageIndex
from tests.hosts.meeting import Meeting
from tests.relay import Relay
from tests.waiting import until

__all__ = [
    "EPSILON_S",
    "Ledger",
    "Place",
    "Role",
    "client_processes",
    "gang_of",
    "kill",
    "kill_head",
    "noted",
    "nothing_runs_on",
    "pids",
    "ray_processes",
]

P = ParamSpec("P")
T = TypeVar("T")
Role = Literal["standby", "watchdog", "agent", "zygote", "slot", "stub", "sshd", "head"]

EPSILON_S = 60.0
"""Seconds beyond a lease until all of a node must be gone; a loaded machine is slow to kill."""


# On the node --------------------------------------------------------------------------------------------------------


def pids(host: Host, role: Role) -> list[Process]:
    """Return our processes of one kind on a host, the longest running first."""
    alive = host.processes()
    parents = {process.pid: _parent(process) for process in alive}
    nodes = {p.pid for p in alive if "skyward.node.agent.main" in p.command}
    workers = {p.pid for p in alive if "skyward.node.slot.zygote" in p.command}
    watchdogs = {pid for pid in nodes if parents[pid] in nodes and parents[parents[pid]] not in nodes}
    agents = {pid for pid in nodes if parents[pid] in watchdogs}
    zygotes = {pid for pid in workers if parents[pid] in agents}
    stubs = {p.pid for p in alive if "agent/attach.py" in p.command and p.command.startswith("/")}
    heads = {p.pid for p in alive if "skyward.engine.head.main" in p.command}
    found: dict[Role, set[int]] = {
        "standby": {pid for pid in nodes if parents[pid] not in nodes},  # not a child that the agent has just forked
        "watchdog": watchdogs,
        "agent": agents,
        "zygote": zygotes,
        "slot": {pid for pid in workers if parents[pid] in zygotes},
        "stub": stubs,
        # Like an agent, a head has two parents.
        "head": {pid for pid in heads if parents[pid] in heads and parents[parents[pid]] in heads},
        # The process of a log-in is a child of the listening one.
        "sshd": {p.pid for p in alive if p.name == "sshd" and re.match(r"sshd: \w+@", p.command)},
    }
    return [process for process in alive if process.pid in found[role]]


def _parent(process: Process) -> int:
    """Return the pid of the parent inside the host, or 0 if the process ended meanwhile."""
    try:
        status = Path(f"/proc/{process.outside_pid}/status").read_text()
        outside = int(re.search(r"^PPid:\t(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
        inside = Path(f"/proc/{outside}/status").read_text()
        return int(re.search(r"^NSpid:.*\t(\d+)$", inside, re.MULTILINE)[1])  # type: ignore[index]
    except OSError:
        return 0


def kill(host: Host, role: Role) -> list[int]:
    """Wait until there are processes of one kind, and kill them all with SIGKILL. Returns their pids."""
    until(lambda: pids(host, role))
    chosen = pids(host, role)
    for process in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.outside_pid, signal.SIGKILL)
    return [process.pid for process in chosen]


def ray_processes(host: Host, name: str = "") -> list[int]:
    """Return the processes of Ray on a host whose command has this text, as seen from here."""
    mine = re.compile(r"ray::|/ray/core/|ray\.scripts|skyward\.engine\.ray\.driver")
    return [p.outside_pid for p in host.processes() if mine.search(p.command) and name in p.command]


def kill_head(host: Host) -> None:
    """Kill the head, and wait for the next one."""
    (before,) = kill(host, "head")
    until(lambda: any(head.pid != before for head in pids(host, "head")))


def nothing_runs_on(hosts: Sequence[Host], within_s: float = EPSILON_S) -> None:
    """Check that within that time only the processes of a bare host run there."""
    deadline = time.monotonic() + within_s
    while left := {host.name: host.started_processes() for host in hosts if host.started_processes()}:
        assert time.monotonic() < deadline, f"still running after {within_s:g} s: {left}"
        time.sleep(0.05)


# On the client ------------------------------------------------------------------------------------------------------


def client_processes(folder: Path) -> dict[str, list[int]]:
    """Return a client's processes whose connections are in `folder` (its TMPDIR), and its keepers."""
    found: dict[str, list[int]] = {"master": [], "channel": [], "keeper": []}
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            state, parent, *_ = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if state in "ZX":
                continue
            parents[int(name)] = int(parent)
            if " -O check " in command:  # asks a master whether it is alive
                continue
            if f"{folder}/skyward-ssh" in command and command.startswith("ssh"):
                found["channel" if "ControlMaster=no" in command else "master"].append(int(name))
            elif f"{folder}/skyward-ssh" in command and " skyward.ssh.pure" in command:
                found["master" if "pure_process" in command else "channel"].append(int(name))
            elif "keeper_process" in command and f"TMPDIR={folder}".encode() in environment:
                found["keeper"].append(int(name))
    # A keeper starts commands, and a child looks like its parent until it runs its own program.
    found["keeper"] = [pid for pid in found["keeper"] if parents[pid] not in found["keeper"]]
    return found


# Pools --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place for pools of a test: hosts and the packages installed there."""

    bed: Bed
    index: PackageIndex
    hosts: Sequence[Host]

    def ssh(self, lease_s: float = 60.0, transport: Transport = "openssh") -> sky.SSH:
        names = [host.name for host in self.hosts]
        return sky.SSH(hosts=names, config_file=str(self.bed.ssh_config), lease_s=lease_s, transport=transport)

    @contextlib.contextmanager
    def ssh_by_relay(self, lease_s: float) -> Iterator[tuple[sky.SSH, Relay]]:
        """Put a relay between the client and the first host, which it reaches as "head"."""
        first, *others = self.hosts
        with contextlib.closing(Relay((first.address, 22))) as line:
            config = self.bed.folder / f"{first.name}-relay.config"
            there = f"Host head\n HostName {line.host}\n Port {line.port}\n HostKeyAlias {first.name}\n"
            config.write_text(f"{there}Match all\n Include {self.bed.ssh_config}\n")
            names = ["head", *(host.name for host in others)]
            yield sky.SSH(hosts=names, config_file=str(config), lease_s=lease_s), line

    @property
    def image(self) -> sky.Image:
        return sky.Image(pip_index_url=self.index.simple)

    @contextlib.contextmanager
    def pool(
        self, *, lease_s: float = 60.0, transport: Transport = "openssh", **options: Any
    ) -> Iterator[sky.ComputePool]:
        """Open a pool on the hosts, by default a direct one. When it is closed, nothing of it runs there."""
        options = {"nodes": len(self.hosts), "engine": "direct", "logs": False, **options}
        with sky.ComputePool(provider=self.ssh(lease_s, transport), image=self.image, **options) as pool:
            yield pool
        nothing_runs_on([host for host in self.hosts if host.is_on])


def gang_of(function: Callable[P, T]) -> sky.ComputeFunction[P, T]:
    """Return a gang whose ranks need nothing except each other."""
    return sky.compute(integrate(function, Meeting()))


def nested_call_s(pool: sky.ComputePool, on: int, to: int) -> float:
    """Return how long a task on one node waits for a call on another one: the median, in seconds."""
    there, nothing = pool.node(to), sky.compute(lambda: None)

    @sky.compute
    def nested(times: int) -> list[float]:
        took = []
        for _ in range(times):
            began = time.monotonic()
            nothing() >> there
            took.append(time.monotonic() - began)
        return took

    return statistics.median(nested(11) >> pool.node(on))


def noted(path: str, seconds: float, endless: Sequence[int] = ()) -> sky.ComputeFunction[[int], int]:
    """Enter a number in the ledger, take that long, and return the number. Some numbers never return by themselves."""

    @sky.compute
    def call(number: int) -> int:
        with open(path, "a") as file:
            file.write(f"{number}\n")
        time.sleep(600 if number in endless else seconds)
        return number

    return call


# Books --------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Ledger:
    """Calls that began on the hosts, and the client's results."""

    hosts: Sequence[Host]
    path: str = field(default_factory=lambda: f"/root/ledger-{uuid.uuid4().hex}")
    delivered: list[int] = field(default_factory=list)
    """The numbers whose outcome was told, once for each time that it was."""

    def ran(self) -> Counter[int]:
        """Return how often each number began."""
        return Counter(int(line) for host in self.hosts for line in self._lines(host))

    def _lines(self, host: Host) -> list[str]:
        with contextlib.suppress(OSError):
            return host.read(self.path).split()
        return []

    def submit(self, call: Any, number: int) -> sky.Future[int]:
        """Submit a call. `call` is a future that yields this number when it succeeds."""
        call.add_done_callback(lambda _: self.delivered.append(number))
        return call  # type: ignore[no-any-return]

    def settle(self, futures: Mapping[int, Any], *, within_s: float = 60.0) -> dict[int, NodeError]:
        """Wait for all calls, and compare: acknowledged ones ran, and none was reported twice.

        Returns the losses, by number.
        """
        deadline = time.monotonic() + within_s
        losses: dict[int, NodeError] = {}
        for number, future in futures.items():
            try:
                assert future.result(max(0.1, deadline - time.monotonic())) == number
            except NodeError as error:
                losses[number] = error
        until(lambda: len(self.delivered) >= len(futures))
        assert sorted(self.delivered) == sorted(futures)
        ran = self.ran()
        for number in futures:
            if number not in losses:
                assert ran[number] >= 1, f"call {number} was acknowledged and never ran"
        return losses

    def clear(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(OSError):
                host.path(self.path).unlink()
