"""Machines that answer to SSH become nodes: connected, prepared, an agent started; and in the end nothing is left.

Used by every provider whose machines are not this one. It makes no machine and ends none.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence

from ..bootstrap.code import gather
from ..errors import NodeError, ProviderError, Unreachable
from ..events import Emit
from ..ssh import HostKeys, SSHTarget
from ..ssh.connect import Transport
from ..values.machine import Machine, PoolSpec
from .node_setup import NodeSetup, Orders, Place, RemoteNodeHandle, end_agent
from .rented import Host
from .termination import shielded
from .user_data import LEASE_FILE, PREEMPTED_FILE

__all__ = ["RemoteNodeHandle", "Place", "bring_up", "bring_up_rented", "end", "let_go"]

_BY_ITSELF_S = 8.0
"""Seconds that a node that was told to end gets for it."""
_PORT = 22
_AUTH_GRACE_S = 60.0
"""A machine's sshd may answer before the key of the pool is in place."""
_PROBE_S = 2.0
_LOOK_S = 3.0


def bring_up(
    places: Sequence[Place],
    spec: PoolSpec,
    pool: str,
    nodes: Sequence[int],
    emit: Emit,
    *,
    lease_s: float,
    lease_file: str = "",
    notice_file: str = "",
    transport: Transport | None = None,
    connect_s: float | None = None,
) -> list[Machine]:
    """Nodes with these indices at these places, all at a time; all of them, or none and an error.

    `lease_file`: a file over there that the agent touches whenever its lease is renewed.
    `notice_file`: one that is there once the provider has announced that it takes the machine back.

    Machines may still be booting, for `connect_s`, by default `spec.provision_timeout_s`. A connection that is lost on
    the way is made anew, up to five times for each node. Ctrl-C, `spec.stop`, and the failure of one node, stop the
    others; when this raises, nothing of ours runs on any of them that can still be reached.

    Raises:
        The error of the node that failed first, with its index as `node`, the others in its notes: Unreachable,
        AuthFailed, HostKeyUnknown, HostKeyChanged, BootstrapFailed, NoCapacity where a machine is smaller than `spec`
        asks, ProviderError where the agent does not start.
    """
    stop = threading.Event()
    orders = Orders(
        spec=spec,
        pool=pool,
        emit=emit,
        lease_s=lease_s,
        lease_file=lease_file,
        notice_file=notice_file,
        transport=transport,
        connect_s=spec.provision_timeout_s if connect_s is None else connect_s,
        stop=stop,
        code=gather(spec.image) if spec.code is None else spec.code,
        are_prepared=threading.Barrier(len(nodes)),
    )
    ways = [NodeSetup(place, node, orders) for place, node in zip(places, nodes, strict=True)]
    threads = [threading.Thread(target=way.go, name=f"skyward-node-{way.node}", daemon=True) for way in ways]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # Ctrl-C comes through between two of these
                if spec.stop.is_set():
                    stop.set()
                    orders.are_prepared.abort()
        failed = sorted((way for way in ways if way.error is not None), key=lambda way: way.failed_at)
        if failed:
            raise _joined([way.error for way in failed if way.error is not None])
        return [way.machine for way in ways if way.machine is not None]
    except BaseException:
        stop.set()
        orders.are_prepared.abort()
        shielded(lambda: _abandon(ways, threads))
        raise


def _abandon(ways: list[NodeSetup], threads: list[threading.Thread]) -> None:
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
        node: RemoteNodeHandle = machine.handle
        try:
            end_agent(node, _BY_ITSELF_S)
        except (NodeError, ProviderError, OSError):
            unreached.append(machine)
        finally:
            node.connection.close()

    shielded(lambda: _in_parallel([functools.partial(end_one, machine) for machine in machines]))
    return unreached


def _in_parallel(actions: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)  # Ctrl-C comes through between two of these


# Rented machines ------------------------------------------------------------------------------------------------------


def bring_up_rented(hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
    """Agents on all of the hosts, or none of them and an error; see `bring_up`."""
    deadline = time.monotonic() + spec.provision_timeout_s
    keys: dict[int, tuple[str, ...]] = {}

    def ask_keys(host: Host) -> None:
        keys[host.node] = _host_keys(host, deadline, spec.stop)

    _in_parallel([functools.partial(ask_keys, host) for host in hosts])
    left_s = max(1.0, deadline - time.monotonic())
    return bring_up(
        [_place(host, keys.get(host.node, ())) for host in hosts],
        spec,
        pool,
        nodes,
        emit,
        lease_s=hosts[0].lease_s,
        lease_file=LEASE_FILE,
        notice_file=PREEMPTED_FILE,
        connect_s=left_s,
    )


def let_go(machines: list[Machine]) -> None:
    """Close what leads to machines that are gone."""
    for machine in machines:
        if isinstance(machine.handle, RemoteNodeHandle):
            machine.handle.connection.close()


def _place(host: Host, keys: tuple[str, ...]) -> Place:
    # An address may be another machine's tomorrow, an id never is.
    pinned = HostKeys(policy="pin", file=host.known_hosts, alias=host.instance.id)
    target = SSHTarget(
        host=host.address,
        port=_PORT,
        user=host.username,
        key_file=host.key_file,
        config_file="none",
        host_keys=HostKeys(policy="given", keys=keys) if keys else pinned,
    )
    return Place(
        target=target,
        private_address=host.instance.private_ip,
        public_address=host.instance.public_ip,
        auth_grace_s=_AUTH_GRACE_S,
    )


def _host_keys(host: Host, deadline: float, stop: threading.Event) -> tuple[str, ...]:
    """Those that the provider vouches for, as long as that holds up nothing: until the machine's sshd answers."""
    while True:
        is_open = _answers(host.address)
        keys = host.ask_host_keys()
        if keys or is_open or time.monotonic() > deadline or stop.wait(_LOOK_S):
            return keys


def _answers(address: str) -> bool:
    # It does not answer yet.
    with contextlib.suppress(OSError), socket.create_connection((address, _PORT), timeout=_PROBE_S):
        return True
    return False
