"""Ray: a cluster of the user's own Ray over the nodes of a call, which lives as long as the call.

`ray start` runs on every node, as a child of the node's rank. Rank 0 listens at the gang's rendezvous. The other ranks
keep a connection to it, which brings them the address and the token of the cluster. Its end tells them that the
function has returned. All that Ray starts ends with its rank, as all processes of a rank do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from ..errors import MissingDependency, RendezvousFailed, SlotLost, UsageError
from ..node.slot.ports import PortLocks, port_behind
from ..node.slot.runtime import current_call
from ..values.launch import Returns
from ..values.ray_start import AGENTS, NO_METRICS, NO_REPORTS, PATIENCE, STARTED, TOKEN, start_command
from ..values.topology import Rank
from .base import IntegrationBase, decorator_of
from .rendezvous import MEETING_LIMIT_S, OPEN_PORTS, listen_at_head, past_the_proxy, wait_for_head

_LEAST_STORE_GIB = 0.075
"""Ray refuses to start with a smaller object store (75 MiB)."""
_TAIL = 2000
_LOOK_S = 0.1
_LEAVING_S = 10.0
"""Seconds for the other nodes to leave before the head does."""
_AFTER_THE_CAUSE_S = 10.0
"""Seconds for which a rank keeps back that another one has failed. The gang reports the first error, and that one has
the cause. It usually stops this rank meanwhile.
"""
_FOR_DASHBOARD = ("aiohttp_cors", "colorful")
"""Modules that only `ray[default]` brings. Without them, Ray's dashboard and its metrics are off."""
_FOR_CLIENTS = "grpc"
"""Module with which Ray's head serves Ray Client."""


@dataclass(frozen=True, kw_only=True)
class RayClusterIntegration(IntegrationBase):
    """Run the function on rank 0 of a Ray cluster that spans the nodes of the call; use it bare or with options.

    `ray.init()` in the function connects to the cluster, so Ray Data, Ray Train and Ray Tune find all nodes. `@ pool`
    takes all nodes, `@ pool.any(4)` four of them, `>> pool` one. Ray's version is the one that is installed on the
    nodes. The cluster begins with the call and ends with it. Each Ray node has the processors that the call books by
    `cpus=`, or all of its node, and the node's accelerators. Outside a pool, and in `.local(...)`, the function is
    called as it is. Write the decorator below `@sky.compute`.

    Ray listens on all interfaces of the nodes. A token, made for the call, keeps others out from Ray 2.52 on.

    Args:
        processes_per_node: always 1, one Ray node on each node.
        returns: always "head": the value of the function, which only rank 0 runs.
        dashboard: whether the head serves Ray's dashboard on its loopback. The port is printed; `pool.forward(port)`
            brings it to this machine. Its page asks for the token, from Ray 2.52 on, so that is printed too. It needs
            `ray[default]` on the nodes.
        object_store_gib: memory of each node's object store in GiB, >= 0.075. None: Ray's own choice, a part of the
            node's memory.

    Raises:
        UsageError: an option is out of range, or the decorated object is not a plain function.
        MissingDependency: in the rank: Ray is not installed on the node.
        RendezvousFailed: in the rank: a node could not start Ray or could not reach the head.
        SlotLost: in the rank: Ray ended by itself on a node, other than the head, while the function ran.

    Example:
        >>> @ray_cluster(object_store_gib=1)
        ... def squares(n: int) -> list[int]:
        ...     import ray
        ...     ray.init()
        ...     square = ray.remote(lambda x: x * x)
        ...     return ray.get([square.remote(x) for x in range(n)])
        >>> squares.__name__
        'squares'
    """

    name: ClassVar[str] = "ray_cluster"
    extra: ClassVar[str] = "ray"
    packages: ClassVar[tuple[str, ...]] = ("ray",)
    is_for_head: ClassVar[bool] = True

    returns: Returns = "head"
    dashboard: bool = False
    object_store_gib: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes_per_node != 1:
            raise _refusal(
                "processes_per_node", self.processes_per_node, "starts one Ray node on each node; leave it out"
            )
        if self.returns != "head":
            raise _refusal("returns", self.returns, "runs the function on rank 0 only; leave it out")
        if not isinstance(self.dashboard, bool):
            raise _refusal("dashboard", self.dashboard, "takes True or False; set dashboard=True")
        gib = self.object_store_gib
        is_size = isinstance(gib, int | float) and not isinstance(gib, bool) and _LEAST_STORE_GIB <= gib < float("inf")
        if gib is not None and not is_size:
            raise _refusal(
                "object_store_gib", gib, f"takes a number of GiB >= {_LEAST_STORE_GIB}, or None; set object_store_gib=1"
            )

    def environment(self, rank: Rank) -> dict[str, str]:
        """Return variables that keep Ray's reports at home, make it patient, and lead it past a proxy."""
        addresses = [rank.head_addr, *(peer.private_ip for peer in rank.peers)]
        ours = {**NO_REPORTS, **PATIENCE}
        return {name: os.environ.get(name, value) for name, value in ours.items()} | past_the_proxy(addresses)

    def prepare(self, rank: Rank) -> None:
        if importlib.util.find_spec("ray") is None:
            raise _missing("ray")
        if self.dashboard and rank.rank == 0 and not _has_dashboard():
            raise _missing("ray[default]")

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        # Not below TMPDIR, which may be long: Ray puts sockets into this folder, whose paths have at most 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="sky-ray-", dir="/tmp"))
        try:
            with self._head(rank, folder) if rank.rank == 0 else self._member(rank, folder):
                yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _head(self, rank: Rank, folder: Path) -> Iterator[None]:
        port, dashboard_port, client_port = (port_behind(rank.head_port, -steps) for steps in (1, 2, 3))
        locks, token = PortLocks(rank.local_addr), secrets.token_hex(32)
        for held in (port, dashboard_port, client_port):
            locks.hold(held)  # until the process exits
        cluster = {"address": f"{_in_url(rank.head_addr)}:{port}", "token": token, "folder": str(folder)}
        arguments = ["--head", f"--port={port}", f"--temp-dir={folder}", *self._dashboard(rank, dashboard_port, token)]
        # Ray's own choice is one port for all clusters of a machine. The second `ray start` would end with an error.
        if importlib.util.find_spec(_FOR_CLIENTS) is not None:
            arguments.append(f"--ray-client-server-port={client_port}")
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(listen_at_head(rank))
            node = stack.enter_context(_RayNode(rank, folder, token, [*arguments, *self._size(rank)]))
            members = [stack.enter_context(member) for member in _members(rank, listener, cluster)]
            _until_joined(members, node)
            os.environ |= {"RAY_ADDRESS": cluster["address"], **_metrics(), **_secret(token)}
            yield
            _disconnect()
            for member in members:
                member.shutdown(socket.SHUT_WR)
            _until_gone(members)

    @contextmanager
    def _member(self, rank: Rank, folder: Path) -> Iterator[None]:
        wait_for_head(rank)
        with socket.create_connection((rank.head_addr, rank.head_port), timeout=MEETING_LIMIT_S) as head:
            head.sendall(b"%d\n" % rank.rank)
            text = _line(head)
            if not text:
                time.sleep(_AFTER_THE_CAUSE_S)
                raise RendezvousFailed(f"rank {rank.rank}: rank 0 ended before Ray ran there; read its output")
            cluster = json.loads(text)
            address = f"--address={cluster['address']}"
            try:
                with _RayNode(rank, folder, cluster["token"], [address, *self._size(rank)]) as node:
                    head.sendall(b"joined\n")
                    yield
                    while not select.select([head], [], [], _LOOK_S)[0]:
                        node.check(has_begun=True)
            finally:
                shutil.rmtree(cluster["folder"], ignore_errors=True)  # Ray uses the head's path on every machine

    def _size(self, rank: Rank) -> list[str]:
        """Return the resources of a node, and ports of its own, since several nodes may share a machine."""
        call = current_call()
        booked = None if call is None else call.info.cpus
        store = [] if self.object_store_gib is None else [f"--object-store-memory={int(self.object_store_gib * 2**30)}"]
        cpus = max(1, int(booked)) if booked is not None else len(os.sched_getaffinity(0))
        return [
            f"--num-cpus={cpus}",
            f"--num-gpus={rank.accelerators}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            *_agent_ports(rank),
            *store,
        ]

    def _dashboard(self, rank: Rank, port: int, token: str) -> list[str]:
        if not self.dashboard:
            return ["--include-dashboard=false", f"--dashboard-port={port}"]
        where = f"pool.forward({port}, node={rank.node}) brings it to you"
        sys.stdout.write(f"Ray's dashboard: port {port} of this node; {where}; from Ray 2.52 on its token is {token}\n")
        return ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}"]


ray_cluster = decorator_of(RayClusterIntegration)


class _RayNode:
    """`ray start --block` of one node. Entered when its node belongs to the cluster, killed when it is left."""

    def __init__(self, rank: Rank, folder: Path, token: str, arguments: list[str]) -> None:
        self._rank, self._log = rank, folder / "start.log"
        self._name = f"rank {rank.rank} of {rank.world_size}"
        # Ray's workers import what the function can import, such as modules that travelled to this node.
        path = os.pathsep.join(folder for folder in sys.path if folder)
        variables = {**os.environ, **_metrics(), **_secret(token), "PYTHONPATH": path}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                start_command(sys.executable, "--block", f"--node-ip-address={rank.local_addr}", *arguments),
                env={name: value for name, value in variables.items() if name != "RAY_ADDRESS"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            deadline = time.monotonic() + MEETING_LIMIT_S
            while STARTED not in (text := self._text()):
                self.check()
                if time.monotonic() > deadline:
                    raise self._failed(f"did not start within {MEETING_LIMIT_S:.0f} s", text)
                time.sleep(_LOOK_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def check(self, *, has_begun: bool = False) -> None:
        """Raise an error if Ray has ended by itself.

        Args:
            has_begun: whether the function may have begun. The error is then not one that the gang retries by itself.
        """
        code = self._process.poll()
        if code is None:
            return
        if not has_begun:
            raise self._failed(f"ended with code {code}", self._text())
        raise SlotLost(
            f"{self._name}: Ray ended with code {code} on node {self._rank.node} while the function ran; set retries=1 "
            f"to run it again. Ray printed:\n{self._text()[-_TAIL:]}",
            signal=-code if code < 0 else None,
            exit_code=code if code >= 0 else None,
        )

    def _failed(self, how: str, text: str) -> RendezvousFailed:
        return RendezvousFailed(
            f"{self._name}: Ray {how} on node {self._rank.node}; {OPEN_PORTS}. Ray printed:\n{text[-_TAIL:]}"
        )

    def _text(self) -> str:
        return self._log.read_text(errors="replace")

    def _end(self) -> None:
        """Kill Ray's processes: asked to end, they would wait for a head that is gone."""
        with contextlib.suppress(ProcessLookupError):  # ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _members(rank: Rank, listener: socket.socket, cluster: dict[str, str]) -> list[socket.socket]:
    """Take the connections of the other ranks, and tell each of them about the cluster."""
    members: list[socket.socket] = []
    deadline = time.monotonic() + MEETING_LIMIT_S
    while len(members) < rank.world_size - 1:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            member, _ = listener.accept()
            member.settimeout(max(0.1, deadline - time.monotonic()))
            if not _line(member):  # `wait_for_head` only looks whether somebody listens
                member.close()
                continue
            member.sendall(json.dumps(cluster).encode() + b"\n")
        except OSError as error:
            raise RendezvousFailed(
                f"rank 0: {len(members)} of {rank.world_size - 1} other nodes came within {MEETING_LIMIT_S:.0f} s "
                f"({error}); {OPEN_PORTS}"
            ) from error
        members.append(member)
    return members


def _until_joined(members: list[socket.socket], node: _RayNode) -> None:
    waiting = list(members)
    # A node that cannot start Ray says so itself within the limit. This end is for one that has fallen silent.
    deadline = time.monotonic() + MEETING_LIMIT_S + _LEAVING_S
    while waiting:
        node.check()
        if time.monotonic() > deadline:
            raise RendezvousFailed(f"rank 0: {len(waiting)} other nodes did not join; {OPEN_PORTS}")
        for member in select.select(waiting, [], [], _LOOK_S)[0]:
            if not _line(member):
                time.sleep(_AFTER_THE_CAUSE_S)
                raise RendezvousFailed("rank 0: another node could not start Ray; read the output of the other ranks")
            waiting.remove(member)


def _until_gone(members: list[socket.socket]) -> None:
    deadline = time.monotonic() + _LEAVING_S
    for member in members:
        with contextlib.suppress(OSError):  # a node that is slow to leave, or gone, does not keep the value back
            member.settimeout(max(0.1, deadline - time.monotonic()))
            member.recv(1)


def _disconnect() -> None:
    """Close the function's own connection to the cluster, if it has one."""
    framework: Any = sys.modules.get("ray")
    if framework is not None:
        framework.shutdown()


def _line(connection: socket.socket) -> str:
    """Read one line, byte by byte: lines are short, and nothing behind them must be lost. "" if it has ended."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while byte := connection.recv(1):
            if byte == b"\n":
                return data.decode()
            data += byte
    return ""


def _agent_ports(rank: Rank) -> list[str]:
    locks = PortLocks(rank.local_addr)  # until the process exits
    return [f"--{agent}-port={locks.reserve()}" for agent in AGENTS]


def _has_dashboard() -> bool:
    return all(map(importlib.util.find_spec, _FOR_DASHBOARD))


def _metrics() -> dict[str, str]:
    return {} if _has_dashboard() else NO_METRICS


def _secret(token: str) -> dict[str, str]:
    return {**TOKEN, "RAY_AUTH_TOKEN": token}


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _missing(package: str) -> MissingDependency:
    return MissingDependency(
        f"{package}: not installed here; run `pip install 'skyward[ray]'`, or set Image(pip=[{package!r}]) for remote "
        "nodes",
        name=package,
    )


def _refusal(field: str, value: object, problem: str) -> UsageError:
    return UsageError(f"{field}={value!r}: @ray_cluster {problem}", field=field, value=value)
