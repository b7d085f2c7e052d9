"""Machines that answer to SSH become nodes: connected, prepared, an agent started; and in the end nothing is left.

Used by every provider whose machines are not this one. It makes no machine and ends none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..accelerators import Accelerator
from ..agent import attach
from ..agent.outside import reply_of
from ..bootstrap.code import Code, gather
from ..bootstrap.prepare import Ready, prepare
from ..errors import NoCapacity, NodeError, ProviderError, Unreachable
from ..events import Emit, PhaseEnded, PhaseFailed, PhaseStarted
from ..machine import Machine, PoolSpec
from ..ssh import Connection, Target, wait_until_ready
from ..ssh.connection import Transport
from ..topology import Peer
from ..wire.tasks import NodeConfig
from .ending import shielded

__all__ = ["Node", "Place", "bring_up", "end"]

_AGENT_LIMIT_S = 60.0
_END_LIMIT_S = 20.0
_BY_ITSELF_S = 8.0
"""Seconds that a node that was told to end gets for it."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ARCHITECTURES = {"aarch64": "arm64"}
_BOOT = "import sys; sys.path[:] = sys.argv[1:{count}]; from skyward.agent.outside import {name}; sys.exit({name}())"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a node is to be: how the machine is reached from here, and what it is called on the nodes' own network.

    private_address: at which the other nodes find it; empty: the one that the SSH connection arrives at over there.
    public_address: for people; empty: there is none that is known.
    auth_grace_s: how long a machine that just booted may refuse our key.
    """

    target: Target
    private_address: str = ""
    public_address: str = ""
    auth_grace_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """The handle of a remote Machine: what ends it."""

    connection: Connection = field(repr=False)
    watchdog: int
    started: str
    """With `watchdog` it names the process for good, see `skyward.agent.outside`."""
    folder: str
    python: tuple[str, ...]
    """The command of its agent's interpreter."""
    path: tuple[str, ...]
    place: Place


def bring_up(
    places: Sequence[Place],
    spec: PoolSpec,
    pool: str,
    nodes: Sequence[int],
    emit: Emit,
    *,
    lease_s: float,
    lease_file: str = "",
    transport: Transport | None = None,
    connect_s: float | None = None,
) -> list[Machine]:
    """Nodes with these indices at these places, all at a time; all of them, or none and an error.

    `lease_file`: a file over there that the agent touches whenever its lease is renewed.

    Machines may still be booting, for `connect_s`, by default `spec.provision_timeout_s`. Ctrl-C, and the failure of
    one node, stop the others; when this raises, nothing of ours runs on any of them that can still be reached.

    Raises:
        The error of the node that failed first, with its index as `node`, the others in its notes: Unreachable,
        AuthFailed, HostKeyUnknown, HostKeyChanged, BootstrapFailed, NoCapacity where a machine is smaller than `spec`
        asks, ProviderError where the agent does not start.
    """
    stop = threading.Event()
    orders = _Orders(
        spec=spec,
        pool=pool,
        emit=emit,
        lease_s=lease_s,
        lease_file=lease_file,
        transport=transport,
        connect_s=spec.provision_timeout_s if connect_s is None else connect_s,
        stop=stop,
        code=gather(spec.image) if spec.code is None else spec.code,
        are_prepared=threading.Barrier(len(nodes)),
    )
    ways = [_WayUp(place, node, orders) for place, node in zip(places, nodes, strict=True)]
    threads = [threading.Thread(target=way.go, name=f"skyward-node-{way.node}", daemon=True) for way in ways]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # Ctrl-C comes through between two of these
        failed = sorted((way for way in ways if way.error is not None), key=lambda way: way.failed_at)
        if failed:
            raise _joined([way.error for way in failed if way.error is not None])
        return [way.machine for way in ways if way.machine is not None]
    except BaseException:
        stop.set()
        orders.are_prepared.abort()
        shielded(lambda: _abandon(ways, threads))
        raise


def _abandon(ways: list[_WayUp], threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    _in_parallel([way.abandon for way in ways])


def _joined(errors: list[BaseException]) -> BaseException:
    first, *others = errors
    for other in others:
        if not (isinstance(other, Unreachable) and other.was_stopped):
            first.add_note(f"and: {other}")
    return first


def end(machines: Sequence[Machine]) -> list[Machine]:
    """Wait until these nodes, which were told to end, have; kill what is left of them, and close the connections.

    Returns those that could not be reached: their watchdogs end them when their leases are over.
    """
    unreached: list[Machine] = []

    def end_one(machine: Machine) -> None:
        node: Node = machine.handle
        try:
            _end_agent(node, _BY_ITSELF_S)
        except (NodeError, ProviderError, OSError):
            unreached.append(machine)
        finally:
            node.connection.close()

    shielded(lambda: _in_parallel([functools.partial(end_one, machine) for machine in machines]))
    return unreached


def _end_agent(node: Node, by_itself_s: float) -> None:
    arguments = (str(node.watchdog), node.started, node.folder, str(by_itself_s))
    node.connection.run(_python_line(node.python, node.path, "end", arguments), timeout_s=_END_LIMIT_S)


def _in_parallel(actions: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _python_line(python: Sequence[str], path: Sequence[str], name: str, arguments: Sequence[str] = ()) -> str:
    """A line of sh that runs a function of `skyward.agent.outside` over there."""
    boot = _BOOT.format(count=len(path) + 1, name=name)
    return "exec " + shlex.join([*python, "-S", "-E", "-s", "-c", boot, *path, *arguments])


@dataclass(frozen=True, kw_only=True)
class _Orders:
    """What holds for all nodes of one `bring_up`."""

    spec: PoolSpec
    pool: str
    emit: Emit
    lease_s: float
    lease_file: str
    transport: Transport | None
    connect_s: float
    stop: threading.Event
    code: Code
    are_prepared: threading.Barrier


def _fits(wanted: Accelerator, kind: str, count: int) -> bool:
    """`kind`: the driver's name, such as "NVIDIA A100-SXM4-80GB". One that gives no more than the maker may be any."""
    has, want = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in (kind, wanted.name))
    return count >= wanted.count and (want in has or " " not in kind)


class _WayUp:
    """One machine's way to being a node, in a thread of its own."""

    def __init__(self, place: Place, node: int, orders: _Orders) -> None:
        self.node = node
        self.machine: Machine | None = None
        self.error: BaseException | None = None
        self.failed_at = 0.0
        self._place = place
        self._orders = orders
        self._connection: Connection | None = None
        self._folder = f"{orders.pool}-{node}-{os.urandom(3).hex()}"
        self._handle: Node | None = None

    def go(self) -> None:
        try:
            self.machine = self._climb()
        except BaseException as error:
            error.node = self.node  # type: ignore[attr-defined]  # for who may have another machine for it
            self.error, self.failed_at = error, time.monotonic()
            self._orders.stop.set()
            self._orders.are_prepared.abort()

    def abandon(self) -> None:
        """Leave nothing of it. After `go`, whatever came of that."""
        connection = self._connection
        if connection is None:
            return
        try:
            if self._handle is not None:
                _end_agent(self._handle, 0.0)
            # Where a bootstrap makes it, see node.sh; it may have been interrupted before it could say so.
            connection.run(f'rm -rf "/tmp/skyward-$(id -u)/"{shlex.quote(self._folder)}', timeout_s=_END_LIMIT_S)
        except (NodeError, ProviderError, OSError) as error:
            if self.error is not None:
                self.error.add_note(f"node {self.node} may still run: its lease ends it. {error}")
        finally:
            connection.close()

    def _climb(self) -> Machine:
        with self._phase("connect", str(self._place.target)):
            connection = self._connection = wait_until_ready(
                self._place.target,
                timeout_s=self._orders.connect_s,
                auth_grace_s=self._place.auth_grace_s,
                transport=self._orders.transport,
                stop=self._orders.stop,
            )
        with self._holding_lease(connection):
            ready = prepare(
                functools.partial(connection.run, stop=self._orders.stop),
                self._orders.spec.image,
                emit=self._orders.emit,
                node=self.node,
                code=self._orders.code,
                folder=self._folder,
            )
            self._wait_for_the_others()
        with self._phase("agent"):
            said = self._start_agent(connection, ready)
            self._check(ready, said)
        return self._made(connection, ready, said)

    def _wait_for_the_others(self) -> None:
        """Until all can start their agents: nobody renews an agent's lease before all of them run."""
        try:
            self._orders.are_prepared.wait()
        except threading.BrokenBarrierError:
            text = f"{self._place.target}: node {self.node} was stopped: another did not come up"
            raise Unreachable(text, host=str(self._place.target), was_stopped=True) from None

    @contextlib.contextmanager
    def _holding_lease(self, connection: Connection) -> Iterator[None]:
        """Renew the machine's own lease while there is no agent yet: packages may take longer than it lasts."""
        lease_file, done = self._orders.lease_file, threading.Event()

        def renew() -> None:
            while not done.wait(self._orders.lease_s / 4):
                with contextlib.suppress(NodeError, ProviderError, OSError):  # what prepares meets it too
                    connection.run(f"touch {shlex.quote(lease_file)}", timeout_s=_END_LIMIT_S)

        thread = threading.Thread(target=renew, name=f"skyward-lease-{self.node}", daemon=True)
        if lease_file:
            thread.start()
        try:
            yield
        finally:
            done.set()

    @contextlib.contextmanager
    def _phase(self, name: str, detail: str = "") -> Iterator[None]:
        began = time.monotonic()
        self._orders.emit(PhaseStarted(node=self.node, phase=name, detail=detail))
        try:
            yield
        except BaseException as error:
            seconds = time.monotonic() - began
            self._orders.emit(PhaseFailed(node=self.node, phase=name, seconds=seconds, reason=str(error)))
            raise
        self._orders.emit(PhaseEnded(node=self.node, phase=name, seconds=time.monotonic() - began))

    def _start_agent(self, connection: Connection, ready: Ready) -> dict[str, Any]:
        python = (ready.agent_python,)
        done = connection.run(
            _python_line(python, ready.agent_path, "start"),
            input=pickle.dumps(self._config(ready)),
            timeout_s=_AGENT_LIMIT_S,
            stop=self._orders.stop,
        )
        if done.code:
            raise ProviderError(f"{self._place.target}: node {self.node}: {done.error_text}")
        said = reply_of(done.text)
        self._handle = Node(
            connection=connection,
            watchdog=said["pid"],
            started=said["started"],
            folder=ready.folder,
            python=python,
            path=ready.agent_path,
            place=self._place,
        )
        return said

    def _config(self, ready: Ready) -> NodeConfig:
        spec = self._orders.spec
        env = dict(ready.env)
        thread_variables = tuple(name for name in _THREAD_VARIABLES if name not in env)
        env.update(dict.fromkeys(thread_variables, str(max(1, ready.cores // spec.concurrency))))
        return NodeConfig(
            pool=self._orders.pool,
            node=self.node,
            folder=ready.folder,
            slots=spec.concurrency,
            executor=spec.executor,
            python=ready.python,
            path=ready.path,
            cwd=ready.cwd,
            env=tuple(env.items()),
            cores=ready.cores,
            thread_variables=thread_variables,
            preload=spec.preload,
            address=self._place.private_address,
            lease_s=self._orders.lease_s,
            lease_file=self._orders.lease_file,
            cancel_grace_s=spec.cancel_grace_s,
        )

    def _check(self, ready: Ready, said: dict[str, Any]) -> None:
        """What was asked for, where it is known only now. Raises NoCapacity."""
        spec = self._orders.spec
        lacks = []
        if spec.vcpus is not None and ready.cores < spec.vcpus:
            lacks.append(f"vcpus={spec.vcpus}, and it has {ready.cores} cores")
        if spec.memory_gib is not None and ready.memory_gib < spec.memory_gib:
            lacks.append(f"memory_gib={spec.memory_gib:g}, and it has {ready.memory_gib:.1f}")
        if spec.architecture is not None and spec.architecture != _ARCHITECTURES.get(said["machine"], said["machine"]):
            lacks.append(f"architecture={spec.architecture}, and it is {said['machine']}")
        if spec.accelerator is not None and not _fits(spec.accelerator, said["accelerator"], said["accelerators"]):
            has = f"{said['accelerators']} {said['accelerator']}" if said["accelerators"] else "none"
            lacks.append(f"accelerator={spec.accelerator}, and it has {has}")
        if lacks:
            raise NoCapacity(f"{self._place.target}: node {self.node}: asked for {'; '.join(lacks)}")

    def _made(self, connection: Connection, ready: Ready, said: dict[str, Any]) -> Machine:
        command = attach.command(ready.agent_python, said["root"], said["socket"])
        return Machine(
            node=self.node,
            socket_path=said["socket"],
            folder=ready.folder,
            pid=0,
            peer=Peer(
                node=self.node,
                private_ip=said["address"],
                public_ip=self._place.public_address or None,
            ),
            slots=self._orders.spec.concurrency,
            lease_s=self._orders.lease_s,
            interface=said["interface"],
            channel=tuple(connection.argv("exec " + shlex.join(command))),
            terminal=tuple(connection.terminal()),
            handle=self._handle,
        )
